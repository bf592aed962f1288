"""What the bubblewrap backend makes of Dockerfiles, and what is refused before harbor is needed."""

from __future__ import annotations

import importlib.util

import pytest

from envgrad.environments.adapters.harbor import HarborEnvironment
from envgrad.environments.adapters.harbor_build import read_build
from envgrad.errors import ConfigurationError


@pytest.fixture
def context(tmp_path):
    (tmp_path / "src").mkdir()
    for name in ("a.txt", "b.txt", "src/c.py"):
        (tmp_path / name).write_text(name)
    return tmp_path


def build(context, text: str, **options):
    (context / "Dockerfile").write_text(text)
    return read_build(context, **options)


def test_steps_become_folders_copies_and_variables(context):
    made = build(
        context,
        "# a comment\nARG BASE=debian\nFROM docker.io/library/${BASE}:bookworm-slim@sha256:00\n"
        "ENV ROOT=/srv NAME='two words'\nENV OLD style of it\nWORKDIR $ROOT/app\nWORKDIR ../data\n"
        'COPY --chown=1:1 a.txt \\\n  b.txt ./\nCOPY src lib\nCOPY *.txt /all/\nCOPY ["a.txt", "/x y.txt"]\n'
        'CMD ["bash"]\nUSER root\n',
    )
    assert (made.workdir, made.folders) == ("/srv/data", ["/srv/app", "/srv/data"])
    assert made.variables == {"ROOT": "/srv", "NAME": "two words", "OLD": "style of it"}
    assert [(str(copy.source.relative_to(context)), copy.target) for copy in made.copies] == [
        ("a.txt", "/srv/data/a.txt"),
        ("b.txt", "/srv/data/b.txt"),
        ("src", "/srv/data/lib"),
        ("a.txt", "/all/a.txt"),
        ("b.txt", "/all/b.txt"),
        ("a.txt", "/x y.txt"),
    ]


@pytest.mark.parametrize(
    ("step", "words"),
    [
        ("RUN pip install numpy", "refuses 'RUN pip install numpy'"),
        ('ENTRYPOINT ["server"]', "refuses 'ENTRYPOINT"),
        ("USER agent", "one user"),
        ("FROM debian", "one stage"),
        ("COPY --from=other /a /b", "no such option"),
        ("ADD https://example.org/a.txt /a", "fetches and unpacks nothing"),
        ("ADD a.tar.gz /a", "fetches and unpacks nothing"),
        ("COPY missing.txt /a", "no such file"),
        ("COPY only", "to one place"),
        ("COPY <<EOF /a", "to one place"),
        ("COPY ../outside.txt /a", "leads out of the context"),
    ],
)
def test_what_needs_a_build_is_refused(context, step, words):
    (context.parent / "outside.txt").write_text("x")
    with pytest.raises(ConfigurationError, match=words):
        build(context, f"FROM debian\n{step}\n")


def test_links_do_not_lead_out_of_the_context(context):
    (context / "link").symlink_to("/etc/passwd")
    with pytest.raises(ConfigurationError, match="leads out of the context"):
        build(context, "FROM debian\nCOPY link /a\n")


def test_images(context):
    with pytest.raises(ConfigurationError, match=r"FROM ghcr.io/lab/task:1.*images"):
        build(context, "FROM ghcr.io/lab/task:1\n")
    assert build(context, "FROM ghcr.io/lab/task:1\n", images=["ghcr.io/lab/task"]).copies == []
    (context / "Dockerfile").unlink()
    with pytest.raises(ConfigurationError, match="no Dockerfile"):
        read_build(context)
    assert read_build(context, image="ubuntu:24.04").workdir == "/"
    (context / "docker-compose.yaml").write_text("services: {}")
    with pytest.raises(ConfigurationError, match="starts no services"):
        read_build(context, image="ubuntu")


def test_options_that_cannot_work():
    for options, words in (
        ({"tool_seconds": 0}, "tool_seconds=0"),
        ({"determinism": "perhaps"}, "determinism='perhaps'"),
        ({"backend": ""}, "backend=''"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            HarborEnvironment("tasks", **options)
    if importlib.util.find_spec("harbor") is None:
        with pytest.raises(ConfigurationError, match=r"Python 3\.12 or newer.*OtherPython"):
            HarborEnvironment("tasks")
