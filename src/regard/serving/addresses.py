"""Which addresses are this machine's own."""

import ipaddress

from regard.errors import ArgumentError


def refuse_open(host: str, token: str | None) -> None:
    """Refuse to listen on other than this machine's own address without a token.

    Raises:
        ArgumentError: there is none.
    """
    try:
        is_own = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_own = host == "localhost"
    if not is_own and token is None:
        raise ArgumentError(f"host {host} lets others in: give a token_file with a secret")
