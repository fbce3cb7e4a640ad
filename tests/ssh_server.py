"""What every OpenSSH server of the tests is told: loopback and keys alone, nothing of the system's own settings."""

from pathlib import Path


def server_options(folder: Path) -> dict[str, object]:
    """The lines of sshd_config that do not depend on the device; `folder` holds the keys `host` and `user.pub`."""
    return {
        "ListenAddress": "127.0.0.1",
        "HostKey": folder / "host",
        "AuthorizedKeysFile": folder / "user.pub",
        "PidFile": "none",
        "StrictModes": "no",
        "UsePAM": "no",
        "PasswordAuthentication": "no",
        "PermitRootLogin": "prohibit-password",
    }
