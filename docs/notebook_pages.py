"""Notebooks as pages of the site: each is executed once, when the site is built, and shown with what came out.

They are stored without output. A cell that fails, fails the build.
"""

import base64
import importlib.metadata
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import nbclient
import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

_SECONDS = 300  # of a cell, and of a kernel to start, on a loaded machine
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_AT_ONCE = 2
# Compiling takes most of the time. It is done once, as several cells may ask for the same, and faster, as in the tests.
_FASTER = "--xla_backend_optimization_level=1"
if importlib.metadata.version("jaxlib").startswith("0.10."):
    _FASTER += " --xla_cpu_use_fusion_emitters=false"
_ENVIRONMENT = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": _FASTER,
}


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add a page for each notebook, which stays beside it to be downloaded, and its pictures."""
    notebooks = [file for file in files if file.src_uri.endswith(".ipynb")]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        executed = list(pool.map(lambda file: execute(Path(str(file.abs_src_path))), notebooks))
    for file, notebook in zip(notebooks, executed, strict=True):
        stem = file.src_uri.removesuffix(".ipynb")

        def picture(name: str, content: bytes, folder: str = stem.rpartition("/")[0]) -> None:
            files.append(File.generated(config, f"{folder}/{name}", content=content))

        name = stem.rpartition("/")[2]
        files.append(File.generated(config, f"{stem}.md", content=page(notebook, name, picture)))
    return files


def execute(path: Path) -> Any:
    """Run a stored notebook from its first cell to its last in a kernel of its own, and return it with what came out.

    Raises:
        nbclient.exceptions.CellExecutionError: if a cell fails, with the cell and the traceback.
    """
    notebook: Any = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        client = nbclient.NotebookClient(
            notebook,
            timeout=_SECONDS,
            startup_timeout=_SECONDS,
            kernel_name="python3",
            coalesce_streams=True,
            resources={"metadata": {"path": folder}},
            extra_arguments=["--log-level=ERROR"],
        )
        inherited = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}  # it draws inline
        client.execute(env={**inherited, **_ENVIRONMENT, "JAX_COMPILATION_CACHE_DIR": folder, "IPYTHONDIR": folder})
    return notebook


def page(notebook: Any, name: str, picture: Callable[[str, bytes], None]) -> str:
    """Return a notebook as Markdown; ``picture(name, content)`` is called with each picture in it."""
    parts: list[str] = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
        else:
            parts += [_fenced("python", cell.source), *_outputs(cell.outputs, f"{name}-{len(parts)}", picture)]
    heading, _, rest = parts[0].partition("\n")
    link = f"[Download this notebook]({name}.ipynb){{ download }}: it is run when this site is built."
    return "\n\n".join([heading, link, rest, *parts[1:]]) + "\n"


def _outputs(outputs: Any, name: str, picture: Callable[[str, bytes], None]) -> Iterator[str]:
    for number, output in enumerate(outputs):
        if output.output_type == "stream":
            yield _printed(output.text)
        elif "text/html" in output.data:
            yield f'<div class="px-output">{output.data["text/html"]}</div>'
        elif "image/png" in output.data:
            file = f"{name}-{number}.png"
            picture(file, base64.b64decode(output.data["image/png"]))
            yield f"![What the code above draws]({file}){{ .px loading=lazy }}"
        else:
            yield _printed(output.data["text/plain"])


def _printed(text: str) -> str:
    plain = _ANSI.sub("", text).rstrip("\n")
    return f'<div class="px-output" markdown>\n\n{_fenced("text", plain)}\n\n</div>'


def _fenced(language: str, text: str) -> str:
    ticks = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{ticks}{language}\n{text}\n{ticks}"
