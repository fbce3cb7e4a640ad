"""Stages as tasks of an executor, each with the key of what it makes: so that what several need is made once."""
