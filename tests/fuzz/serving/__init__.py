"""The ground `requests`: a server in this process is asked what is drawn."""
