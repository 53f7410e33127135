"""Two ends of a connection prove to each other that they know a secret, and sign what they then say.

Each end sends a nonce, 32 random bytes. A key for each direction follows from the secret and both nonces, and every
message bears HMAC-SHA256 of its number and content under the key of its direction. So whoever does not know the secret
can neither send a message, nor send one again, nor move it to another place, direction or connection.
"""

from __future__ import annotations

import hmac
import secrets

NONCE = 32  # bytes
MAC = 32


class Forged(Exception):
    """A message that no one who knows the secret has sent, or not at this place."""


def nonce() -> bytes:
    return secrets.token_bytes(NONCE)


class Session:
    """One end's view of a connection whose nonces have been exchanged."""

    def __init__(self, key: bytes, servers: bytes, clients: bytes, *, serves: bool) -> None:
        def derived(who: bytes) -> bytes:
            return hmac.digest(key, b"unisono session " + who + servers + clients, "sha256")

        self._send_key, self._receive_key = derived(b"server"), derived(b"client")
        if not serves:
            self._send_key, self._receive_key = self._receive_key, self._send_key
        self._sent = self._received = 0

    def sign(self, content: bytes) -> bytes:
        """The signature of the next message to the other end."""
        self._sent += 1
        return hmac.digest(self._send_key, self._sent.to_bytes(8, "big") + content, "sha256")

    def verify(self, content: bytes, signature: bytes) -> None:
        """Of the next message from the other end. Raises Forged."""
        self._received += 1
        wanted = hmac.digest(self._receive_key, self._received.to_bytes(8, "big") + content, "sha256")
        if not hmac.compare_digest(wanted, signature):
            raise Forged
