"""Download a file once: an interrupted download resumes, and the file must have the pinned SHA-256."""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from http.client import HTTPException
from pathlib import Path

from bsi.errors import DataError
from bsi.io import digest_file
from bsi.progress import Progress

CHUNK = 1 << 18


def download(url: str, to: Path, sha256: str, instead: str, timeout_s: float = 30.0) -> Path:
    """Download `url` to `to`. The file appears only when it is complete; a partial download is stored next to it.

    Args:
        instead: What to do with a file fetched by other means, for the error message.
    """
    if to.is_file():
        found = digest_file(to)
        if found != sha256:
            raise DataError(f"{to} is not the file of {url}: expected sha256 {sha256}, found {found}. Delete it.")
        return to
    part = to.with_name(to.name + ".part")
    have = part.stat().st_size if part.is_file() else 0
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            have = have if response.status == 206 else 0  # a server that ignores the range sends everything
            total = have + int(response.headers.get("Content-Length") or 0)
            with (
                part.open("r+b" if have else "wb") as file,
                Progress(f"download {to.name}", total, "B", done=have) as shown,
            ):
                file.seek(have)
                while chunk := response.read(CHUNK):
                    file.write(chunk)
                    shown.advance(len(chunk))
                file.flush()
                os.fsync(file.fileno())
        if part.stat().st_size < total:
            raise DataError(f"the download of {url} ended early. Run the same command again to resume.")
    except urllib.error.HTTPError as error:
        if error.code != 416:  # 416: everything was received; the hash decides
            raise DataError(f"cannot download {url}: {error}. Fetch it by other means and {instead}.") from error
    except (OSError, HTTPException) as error:
        raise DataError(
            f"cannot download {url}: {error}. Fetch it by other means and {instead}, or run the same command again."
        ) from error
    found = digest_file(part)
    if found != sha256:
        part.unlink()
        raise DataError(f"{url} is not the expected file: expected sha256 {sha256}, found {found}. It was deleted.")
    os.replace(part, to)
    return to
