"""What runs on a device: packed with the device zone into one file, `agent.pyz`. It imports nothing else."""
