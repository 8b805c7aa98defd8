"""Files of text as people have them, given to the commands that read text."""
