"""The command line: click only, one command a file; errors become exit codes here."""
