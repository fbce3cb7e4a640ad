"""The agent that runs on a device. It is packed with the device zone, its only imports, into one file, `agent.pyz`."""
