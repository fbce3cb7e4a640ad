"""Other machines, over ssh: the agent that works there, and this side of it. No daemon, no port (docs/devices.md)."""
