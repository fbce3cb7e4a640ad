"""Runtime releases that compute some graphs wrongly without an error, and the fixes."""
