"""TLS around the connections, for those who want the payload encrypted and authenticated."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from mcjax.errors import ConfigError


@dataclass(frozen=True)
class Tls:
    """Contexts of the side that is called and of the side that calls. `server_name`: what a peer's certificate must be
    for; None where the certificate's issuer is enough."""

    server: ssl.SSLContext
    client: ssl.SSLContext
    server_name: str | None = None

    @classmethod
    def from_files(
        cls, certificate: str | Path, key: str | Path, authority: str | Path, server_name: str | None = None
    ) -> Tls:
        """Mutual TLS 1.3 from PEM files: each side shows `certificate`, and takes whom `authority` has signed.

        Raises `ConfigError` for files that cannot be used.
        """
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.check_hostname = server_name is not None
        for context in (server, client):
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.verify_mode = ssl.CERT_REQUIRED
            try:
                context.load_cert_chain(certificate, key)
                context.load_verify_locations(authority)
            except (OSError, ssl.SSLError) as problem:
                files = ", ".join(str(path) for path in (certificate, key, authority))
                raise ConfigError("tls", files, f"cannot be used as PEM files ({problem})") from None
        return cls(server, client, server_name)
