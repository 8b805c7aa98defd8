"""The command line: `main` runs it, and each of the other files holds a command or what several commands share."""
