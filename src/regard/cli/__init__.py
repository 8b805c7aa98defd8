"""The command line: `main` runs it; the other files hold the commands and their shared code."""
