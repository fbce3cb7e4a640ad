"""Searches that drive several stages: the cost of each layer, where an error enters, what to ship under a budget."""
