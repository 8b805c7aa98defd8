"""The grounds `requests` and `documents`: a server in this process is asked what is drawn."""
