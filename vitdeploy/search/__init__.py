"""What drives several stages: which layer costs how much, where an error enters, what to ship under a budget."""
