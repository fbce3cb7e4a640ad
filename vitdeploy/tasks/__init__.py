"""What each task adds to the line: its data, what is kept of the answers, how they are compared and shown."""
