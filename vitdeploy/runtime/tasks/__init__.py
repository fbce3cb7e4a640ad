"""One file a task: what an app gets, how outputs become that, when two answers are about the same, pictures of them."""
