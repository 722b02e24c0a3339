"""The repository itself: what it promises to a newcomer and to the next machine."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LOCKS = {name: f"{Path(name).stem}.lock" for name in ("requirements.txt", "requirements-lab.txt", "requirements-tpu.txt")}


def lines(name):
    return (ROOT / name).read_text(encoding="utf-8").splitlines()


def pins(name):
    """Package to version of a requirements or lock file."""
    found = (re.match(r"([\w.-]+)(?:\[\w+\])?==([\w.]+)", line) for line in lines(name))
    return dict(each.groups() for each in found if each)


def tracked():
    """The files that are or would be under version control; in an unpacked archive there is no telling."""
    if not shutil.which("git") or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = ["git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, capture_output=True, check=True, text=True).stdout.split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def test_readme_is_short_and_says_what_to_type():
    """A newcomer finds both commands on one page."""
    readme = lines("README.md")
    assert len(readme) <= 120
    for command in ("make book", "make test"):
        assert command in "\n".join(readme)


@pytest.mark.parametrize(("wanted", "lock"), LOCKS.items())
def test_lock_holds_what_the_requirements_pin(wanted, lock):
    """Every direct package is pinned, at the version that is installed."""
    names = [line.split("#")[0].strip() for line in lines(wanted)]
    assert [name for name in names if name and name != "-e ." and "==" not in name] == []
    assert pins(wanted).items() <= pins(lock).items()


def test_libtpu_is_in_an_environment_of_its_own():
    """Large and under terms of its own: the default install never has it."""
    assert [name for name, lock in LOCKS.items() if "libtpu" in pins(lock)] == ["requirements-tpu.txt"]


def test_the_locks_agree():
    """JupyterLab comes into the same environment, and the referee's JAX is the book's: what two locks have is one version."""
    book, *others = (pins(lock) for lock in LOCKS.values())
    assert [name for other in others for name in other.keys() & book.keys() if other[name] != book[name]] == []


@pytest.mark.parametrize("lock", LOCKS.values())
def test_every_locked_package_has_hashes(lock):
    """What is installed is what was tested, byte for byte; and a lock names no place to get it from."""
    text = "\n".join(lines(lock))
    packages = re.split(r"^(?=[\w.-]+==)", text, flags=re.MULTILINE)[1:]
    assert [package.split()[0] for package in packages if "--hash=sha256:" not in package] == []
    assert not re.search(r"://|--index-url|--find-links", text)


def test_requirements_end_with_the_package_itself():
    """`pip install -r requirements.txt` alone makes the notebooks run: they import lib, which must be installed."""
    assert lines("requirements.txt")[-1] == "-e ."


def test_the_package_is_tracked():
    """Many a .gitignore template leaves out every folder named lib."""
    ignored = subprocess.run(["git", "-C", ROOT, "check-ignore", "-q", "lib/__init__.py"]).returncode
    assert ignored != 0


def test_no_file_names_a_place_on_one_machine():
    """Paths are relative: an absolute one works for its author only."""
    place = re.compile(r"(?<![\w.:/*])/(?:home|Users|root|tmp|opt|work)/[\w.]")
    found = []
    for path in tracked():
        if "vendor" in path.parts or path.suffix in {".woff", ".png"} or path == Path(__file__).resolve():
            continue
        found += [f"{path.relative_to(ROOT)}: {m}" for m in place.findall(path.read_text("utf-8", errors="ignore"))]
    assert found == []


def test_the_ci_script_can_be_called():
    """It has its executable bit, which copying through an archive may lose."""
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111


def test_the_readme_shows_what_the_code_prints():
    """The transcript at the top of the README is the present output, and its Python examples run."""
    import numpy as np

    from lib import Plan, Server, chip, decode_step, explain, model

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    server = Server(model("llama-3-70b"), chip("ironwood"), Plan(tensor=8))
    told = str(explain(decode_step, server=server, batch=64, context=32_768)).partition("\n\n")[0]
    assert told in text
    example = text.partition("```python\n")[2].partition("```")[0]
    lines = [line for line in example.splitlines() if "config.json" not in line]    # your model, your chip
    exec("\n".join(lines), {"np": np})
