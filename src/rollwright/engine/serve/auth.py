"""Who may speak to a port: the bearer of its token.

Role: one check. Neighbours: `app` asks before it reads a body; the command line makes the tokens. Invariants:
the comparison takes the same time however much of a guess is right; a token is in no `repr`, hence in no log.
"""

from __future__ import annotations

import hmac
import secrets

from rollwright.errors import ConfigError

SHORTEST = 16


class Token:
    """A secret of a port."""

    def __init__(self, secret: str) -> None:
        """Raises `ConfigError` for one that can be guessed."""
        if len(secret) < SHORTEST or not secret.isascii() or not secret.isprintable() or " " in secret:
            raise ConfigError(
                f"a token is at least {SHORTEST} printable ASCII characters without spaces; make one with "
                "`python -c 'import secrets; print(secrets.token_urlsafe())'`"
            )
        self._secret = secret

    def __repr__(self) -> str:
        return "Token(…)"

    @classmethod
    def fresh(cls) -> Token:
        """A random one."""
        return cls(secrets.token_urlsafe(32))

    def reveal(self) -> str:
        """The secret, for the file that only its owner may read."""
        return self._secret

    def admits(self, authorization: bytes) -> bool:
        """Whether the header `Authorization` bears it."""
        scheme, _, given = authorization.partition(b" ")
        right = hmac.compare_digest(given.strip(), self._secret.encode())
        return right and scheme.lower() == b"bearer"
