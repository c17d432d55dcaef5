"""Takes screenshots of the report and of the built documentation.

python docs/screenshots.py                 train two short runs of the demo (minutes) and capture their report
python docs/screenshots.py RUN [RUN ...]   capture the report of these runs
python docs/screenshots.py --site site     also capture two pages of the documentation

Requires playwright and Chromium (Debian: apt-get install chromium).
"""

from __future__ import annotations

import argparse
import io
import shutil
import tempfile
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, sync_playwright
from rich.console import Console

from mixwell.lab.problems import demo, read_config
from mixwell.report import runs as report
from mixwell.training import config_io
from mixwell.training.run import Run

HERE = Path(__file__).parent
DESKTOP: dict[str, Any] = {"viewport": {"width": 1280, "height": 1500}}
PHONE: dict[str, Any] = {
    "viewport": {"width": 360, "height": 1100},
    "device_scale_factor": 2,
    "is_mobile": True,
}
SIZES = {"desktop": DESKTOP, "phone": PHONE}
MAX_BYTES = 150_000
"""Maximum size of a screenshot."""
# Chromium cannot create a sandbox in a container, and it should not access the network.
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]


def main(words: Sequence[str] | None = None) -> None:
    """Train the runs and take the screenshots.

    Args:
        words: the command line.

    Raises:
        ValueError: Chromium is not installed.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="run directories")
    parser.add_argument(
        "--steps", type=int, default=300, help="training steps of the demo runs (default: 300)"
    )
    parser.add_argument("--site", type=Path, help="folder of the built documentation")
    parser.add_argument("--guide", help="the page to capture at phone size (default: the first in guides/)")
    parser.add_argument("--out", type=Path, default=HERE / "assets", help="output folder")
    given = parser.parse_args(words)
    shown = dict(zip(SIZES, pages(given.site, given.guide), strict=True)) if given.site else {}
    binary = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if binary is None:
        raise ValueError("no Chromium was found; on Debian: apt-get install chromium")
    given.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=binary, args=FLAGS)
        folders = given.runs or demo_runs(Path(scratch), given.steps)
        page = report.write_report(folders, Path(scratch) / "report")[-1]
        for size, options in SIZES.items():
            shoot(browser, page.as_uri(), given.out / f"report-{size}.png", options)
        if shown:
            with served(given.site) as address:
                for size, path in shown.items():
                    shoot(browser, f"{address}/{path}", given.out / f"docs-{size}.png", SIZES[size])
        browser.close()


def demo_runs(folder: Path, steps: int) -> list[Path]:
    """Run the demo with learned and with uniform weights, and return the run directories."""
    demo.write_texts(folder / "data")
    (folder / "demo.yaml").write_text(read_config("demo"), encoding="utf-8")
    common = [f"steps={steps}", "output.evaluate_every=auto", "mixer.traces=projected"]
    made: list[Path] = []
    for name, changes in {"learned": [], "uniform": ["mixer.method=fixed"]}.items():
        config = config_io.read_config(folder / "demo.yaml", [*common, *changes])
        Run(config, folder / name, console=Console(stderr=True)).start()
        made.append(folder / name)
    return made


def pages(site: Path, guide: str | None = None) -> tuple[str, str]:
    """Return the paths of the pages to capture: the first page for the desktop, and a guide for the phone.

    Raises:
        ValueError: a page does not exist.
    """
    found = sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html"))
    guides = [path for path in found if path.startswith("guides/")] or found
    for path in ("index.html", *([guide] if guide else [])):
        if path not in found:
            raise ValueError(f"{site} has no {path}; build the documentation first, or give its folder")
    return "index.html", guide or guides[0]


@contextmanager
def served(site: Path) -> Generator[str]:
    """Serve a folder on localhost, since pages of a site often do not work as plain files.

    Yields:
        The address.
    """
    handler = partial(_Quiet, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Do not log requests."""


def shoot(browser: Browser, address: str, path: Path, options: dict[str, Any]) -> None:
    """Take a screenshot of the top of a page, with few colors to keep the file small.

    Args:
        options: of the browser context: the size of the screen.

    Raises:
        ValueError: the file is too large for the repository.
    """
    context = browser.new_context(**options)
    tab = context.new_page()
    tab.goto(address, wait_until="networkidle")
    shot = Image.open(io.BytesIO(tab.screenshot()))
    context.close()
    for colors in (128, 64, 32):
        few = shot.convert("RGB").quantize(colors, dither=Image.Dither.NONE)
        few.save(path, optimize=True)
        if path.stat().st_size <= MAX_BYTES:
            break
    else:
        raise ValueError(
            f"{path} has {path.stat().st_size} bytes, more than {MAX_BYTES}; take a smaller screen"
        )
    print(path, f"{shot.width} x {shot.height}, {path.stat().st_size // 1000} KB, {colors} colors")


if __name__ == "__main__":
    main()
