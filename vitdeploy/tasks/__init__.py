"""The task adapters: data of a task, what is kept of the answers, how they are compared and shown."""
