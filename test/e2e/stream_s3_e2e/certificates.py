"""Certificates for TLS on loopback, made by openssl."""

import subprocess


def certificates(folder):
    """An authority and a certificate of its for loopback; (authority, certificate, key) as files."""
    openssl = lambda *words: subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)  # noqa: E731
    openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=ca")
    openssl("req", "-newkey", "rsa:2048", "-nodes", "-keyout", "key.pem", "-out", "request.pem", "-subj", "/CN=127.0.0.1")
    (folder / "extensions").write_text("subjectAltName=IP:127.0.0.1\nbasicConstraints=CA:FALSE\n")
    openssl("x509", "-req", "-in", "request.pem", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2",
            "-out", "cert.pem", "-extfile", "extensions")
    return folder / "ca.pem", folder / "cert.pem", folder / "key.pem"
