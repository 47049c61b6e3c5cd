"""Names of other libraries become links to their docs, where these can be reached."""

import sys
from pathlib import Path
from urllib.request import Request, urlopen

SITES = {
    "python": "https://docs.python.org/3",
    "torch": "https://docs.pytorch.org/docs/stable",
    "dimod": "https://docs.dwavequantum.com/en/latest",
}
MOST_BYTES = 16 * 2**20


def inventories(sites: dict[str, str], folder: Path) -> dict[str, tuple[str, str]]:
    """Load each site's list of names into a folder: the mapping for Sphinx, without sites that do not answer.

    Sphinx itself would warn of each of those, and warnings are errors here.
    """
    found = {}
    folder.mkdir(parents=True, exist_ok=True)
    for name, address in sites.items():
        request = Request(f"{address}/objects.inv", headers={"User-Agent": "Sphinx"})
        try:
            with urlopen(request, timeout=10) as reply:
                content = reply.read(MOST_BYTES + 1)
            if len(content) > MOST_BYTES:
                raise OSError(f"its list of names has more than {MOST_BYTES:,} bytes")
        except OSError as error:
            print(f"names of {name} will be no links: {address} gave none ({error})", file=sys.stderr)
            continue
        file = folder / f"{name}.inv"
        file.write_bytes(content)
        found[name] = address, str(file)
    return found
