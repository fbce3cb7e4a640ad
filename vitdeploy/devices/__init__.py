"""Work on other machines over ssh: the agent that runs there, and its client. No daemon, no port (docs/devices.md)."""
