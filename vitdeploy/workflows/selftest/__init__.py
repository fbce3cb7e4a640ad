"""Proof that a target works on a machine: engines built, verified and benched, in one folder to send back."""
