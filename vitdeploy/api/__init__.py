"""The public API of Python, which the command line calls: `import vitdeploy as vd`."""
