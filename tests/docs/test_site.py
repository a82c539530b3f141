"""The built site as a browser shows it: a picture on its first page, and nothing cut off on a
laptop or a phone."""

from __future__ import annotations

import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from queue import Queue
from typing import ClassVar, NamedTuple

import pytest
from patience import LIMIT_S

ROOT = Path(__file__).parents[2]
CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
WIDTHS = 1280, 390


class Seen(NamedTuple):
    """A page in a frame: widths of the frame, of its window and of the content; elements cut off;
    pictures."""

    page: str
    width: int
    inner: int
    content: int
    cut: int
    pictures: int
    broken: int


_PROBE = """<!doctype html><body><script>
const pages = PAGES, widths = WIDTHS, found = [];
const shown = page => new Promise(done => {
  const frame = document.createElement("iframe");
  Object.assign(frame, {width: widths[0], height: 900, src: page});
  frame.onload = () => {
    const inner = frame.contentDocument, window = frame.contentWindow;
    const pictures = [...inner.querySelectorAll("article img")];
    const broken = pictures.filter(one => one.naturalWidth === 0).length;
    for (const width of widths) {
      frame.width = width;
      const wide = inner.documentElement.scrollWidth;
      const cut = [...inner.querySelectorAll("article *")].filter(one => one.clientWidth > 0
        && one.scrollWidth > one.clientWidth + 1 && window.getComputedStyle(one).overflowX === "hidden");
      found.push([page, width, window.innerWidth, wide, cut.length, pictures.length, broken]);
    }
    frame.remove();
    done();
  };
  document.body.append(frame);
});
(async () => {
  for (const page of pages) await shown(page);
  await fetch("/found", {method: "POST", body: JSON.stringify(found)});
})();
</script></body>"""  # in frames: a browser's own window is never as narrow as a phone


class Site(http.server.SimpleHTTPRequestHandler):
    """Serves a folder and keeps what the probe found."""

    found: ClassVar[Queue[str]] = Queue()

    def do_POST(self) -> None:
        self.found.put(self.rfile.read(int(self.headers["Content-Length"])).decode())
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """The site's folder and its address."""
    folder = tmp_path_factory.mktemp("site") / "site"
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(folder)]
    done = subprocess.run(
        build, cwd=ROOT, env=quiet, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stderr
    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(Site, directory=str(folder))
    ) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield folder, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def measure(folder: Path, address: str, pages: list[str], profile: Path) -> list[Seen]:
    """What Chromium shows of each page at each width."""
    text = _PROBE.replace("PAGES", json.dumps(pages)).replace("WIDTHS", json.dumps(WIDTHS))
    (folder / "probe.html").write_text(text, encoding="utf-8")
    command = [
        str(CHROMIUM),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-sync",
        "--disable-background-networking",
        "--disable-component-update",
        f"--user-data-dir={profile}",
        "--remote-debugging-port=0",
        "--window-size=1400,1000",
        f"{address}/probe.html",
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as browser:
        try:
            return [Seen(*row) for row in json.loads(Site.found.get(timeout=LIMIT_S))]
        finally:
            browser.terminate()


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")
@pytest.mark.skipif(find_spec("mkdocs") is None, reason="no mkdocs here")
def test_no_page_is_cut_off_on_a_laptop_or_a_phone(site: tuple[Path, str], tmp_path: Path) -> None:
    folder, address = site
    pages = sorted(str(page.relative_to(folder)) for page in folder.rglob("index.html"))
    assert len(pages) > 40
    found = measure(folder, address, pages, tmp_path / "profile")
    assert len(found) == len(pages) * len(WIDTHS)
    assert [
        one for one in found if one.inner != one.width
    ] == []  # the frames are as wide as they should be
    assert [one for one in found if one.content > one.width or one.cut or one.broken] == []
    assert all(one.pictures for one in found if one.page == "index.html")
    # The probe sees what it is there for.
    (folder / "wide.html").write_text(
        '<article><p style="width:2000px">wide</p><p '
        'style="overflow:hidden;width:9px">cutoff</p><img src="no.png">'
    )
    for one in measure(folder, address, ["wide.html"], tmp_path / "profile"):
        assert one.content > one.width
        assert (one.cut, one.pictures, one.broken) == (1, 1, 1)
