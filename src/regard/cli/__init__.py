"""The command line: `main` runs it; the other files hold the commands and the code that several commands share."""
