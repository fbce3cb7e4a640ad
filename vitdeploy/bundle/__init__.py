"""The bundle: the folder that ships. `read` is for devices, `write` for the host."""
