"""The docs site in headless Chromium: no errors, no request that leaves it, nothing wider than the window.

FSDPTRAIN_CHROMIUM names the browser, else PATH is searched; FSDPTRAIN_REQUIRE_CHROMIUM=1 makes its absence a failure.
"""

import functools
import html
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHOWN = ("", "configuration/", "metrics/", "python_api/", "rewards/", "how_a_step_works/", "repository/CONTRIBUTING/")
WIDTHS = (400, 1280)

# A page of the site in a frame of each width: a window of Chromium is at least 500 pixels wide.
FRAMES = """<!doctype html><link rel="icon" href="data:,"><pre id="found"></pre><script>
const found = [], wanted = WANTED;
async function show([path, width]) {
  const frame = document.createElement("iframe");
  frame.width = width; frame.height = 800; frame.src = "/" + path;
  document.body.append(frame);
  await new Promise(done => frame.onload = done);
  await new Promise(done => setTimeout(done, 300));
  const page = frame.contentWindow;
  found.push({path, width, errors: page.__errors, title: page.document.title,
    wide: page.document.documentElement.scrollWidth, inner: page.innerWidth});
  frame.remove();
}
(async () => {
  for (const one of wanted) await show(one);
  document.getElementById("found").textContent = JSON.stringify(found);
})();
</script>"""
WATCH = b"""<script>
window.__errors = [];
for (const level of ["error", "warn"]) console[level] = (...what) => __errors.push(level + ": " + what.join(" "));
addEventListener("error", e => __errors.push("error: " + (e.message || e.target.src || e.target.href)), true);
addEventListener("unhandledrejection", e => __errors.push("rejected: " + e.reason));
addEventListener("securitypolicyviolation", e => __errors.push("request to " + e.blockedURI));
</script>"""
POLICY = "default-src 'self' 'unsafe-inline' data: blob:"


def test_pages_show_without_errors_and_requests_to_others(site: Path) -> None:
    with served(site) as url:
        found = shown(url)

    assert len(found) == len(SHOWN) * len(WIDTHS)
    for page in found:
        assert page["errors"] == [], page
        assert page["wide"] <= page["inner"] == page["width"], page
        assert "fsdptrain" in page["title"], page


def test_the_search_index_is_part_of_the_site(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    places = {entry["location"].partition("#")[0] for entry in index["docs"]}
    assert {"configuration/", "metrics/", "rewards/"} <= places
    assert not [
        place for place in places if place.startswith("repository/examples")
    ]  # sources are linked, not searched


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    return folder


@contextmanager
def served(site: Path) -> Iterator[str]:
    """Serve the site on a free port, each page with a script that records errors; yields the address."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(site)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Handler(http.server.SimpleHTTPRequestHandler):
    def do_GET(self) -> None:
        file = Path(self.translate_path(self.path))
        if self.path == "/frames":
            wanted = json.dumps([(path, width) for path in SHOWN for width in WIDTHS])
            self.answer(FRAMES.replace("WANTED", wanted).encode())
        elif (file / "index.html").is_file() and self.path.endswith("/"):
            self.answer((file / "index.html").read_bytes().replace(b"<head>", b"<head>" + WATCH, 1))
        else:
            super().do_GET()

    def answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def shown(url: str) -> list[dict]:
    """What Chromium reports of each page and width."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=60000", "--dump-dom"]
    result = subprocess.run([chromium(), *flags, f"{url}/frames"], capture_output=True, text=True, timeout=120)
    text = re.search(r'<pre id="found">(.*?)</pre>', result.stdout, re.DOTALL)
    assert text, result.stderr
    return json.loads(html.unescape(text[1]))


def chromium() -> str:
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    found = os.environ.get("FSDPTRAIN_CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if found is None:
        reason = "no chromium on PATH and FSDPTRAIN_CHROMIUM is not set"
        if os.environ.get("FSDPTRAIN_REQUIRE_CHROMIUM") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    return found
