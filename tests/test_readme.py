"""The README and all other pages name only existing files, commands and settings."""

import re
import shlex
from functools import cache
from pathlib import Path

import pytest

from tests.helpers.command_line import leaves, parsed
from titans_pt.cli import program
from titans_pt.config import FORMER_NAMES
from titans_pt.config.docs import whole_tree
from titans_pt.config.files import load_config
from titans_pt.config.history import GONE
from titans_pt.config.words import known_paths
from titans_pt.kernels.memory.rules import RULES
from titans_pt.models.mixers import MIXERS

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
COMMANDS = (ROOT / "docs/commands.md").read_text()


@cache
def settings() -> frozenset[str]:
    return frozenset(known_paths(whole_tree()))


def commands():
    """Yield the words of every titans or launch line on a page that names a file in configs/."""
    for page in PAGES:
        text = page.read_text().replace("\\\n", " ")
        for line in re.findall(r"^\s*((?:titans|launch/torchrun.sh) [^\n]*)$", text, re.M):
            if re.search(r" \S*configs/", line):
                yield shlex.split(line)


def test_commands_parse_and_their_settings_are_valid():
    found = list(commands())
    assert len(found) >= 6
    for words in found:
        arguments = words[1:] if words[0] == "titans" else ["train", *words[1:]]
        params = parsed(*arguments)
        load_config(ROOT / params["config"], params["overrides"])


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_command_line_is_one_that_the_program_takes(page):
    """Check separate lines and words in backticks, except the table of commands and names without arguments."""
    text = page.read_text().replace("\\\n", " ")
    for line in re.findall(r"(?:^ *|`)titans ([a-z][^`\n]*?)(?=  |`|$)", text, re.M):
        if not re.search(r"\||RUN\.\.\.|\[KEY", line) and tuple(line.split()) not in dict(leaves()):
            parsed(*shlex.split(line.replace("I/16", "0/16").replace("SHELL", "zsh")))


def test_the_table_of_commands_is_the_program():
    """The table has all groups and commands, and only existing arguments and options."""
    known, listed = dict(leaves()), {}
    for section, lines in re.findall(r"^(\w+)\n((?:  titans .*\n)+)", COMMANDS, re.M):
        for usage, about in re.findall(r"^  titans (.*?)  +(.*)$", lines, re.M):
            *group, names = re.match(r"[a-z| ]+(?= |$)", usage)[0].split()
            for name in names.split("|"):
                words = (*group, name)
                assert section == program.commands.section(words[0]), usage
                listed[words] = known[words]
                options = {option for parameter in known[words].params for option in parameter.opts}
                assert set(re.findall(r"--[a-z-]+", usage + about)) <= options, usage
    assert listed == known


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_and_settings_exist(page):
    text = page.read_text()
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", text):
        assert (page.parent / link).exists(), link
    for folder in re.findall(r"^\| `([\w/]+/)`", text, re.M):
        assert (ROOT / folder).is_dir(), folder
    for path in re.findall(r"`((?:titans_pt|kernels|data_pipeline|configs|launch)/[\w/.]+\.\w+)`", text):
        assert "NAME" in path or (ROOT / path).exists(), path
    known = settings()
    for setting in re.findall(r"`((?:run|data|model|train|parallel|evaluation|wandb)\.[a-z_.]+)[`=]", text):
        assert setting in known or (page.name == "CHANGELOG.md" and setting in {*FORMER_NAMES, *GONE}), setting


def test_the_readme_leads_to_every_page():
    readme = (ROOT / "README.md").read_text()
    for page in PAGES:
        assert page.name == "README.md" or f"]({page.relative_to(ROOT)}" in readme, page


def test_links_lead_to_sections():
    """The part after # in a link is the heading of a section, as GitHub writes it."""
    for page in PAGES:
        for link, anchor in re.findall(r"\]\((?!http)([^)#]*)#([^)]+)\)", page.read_text()):
            target = (page.parent / link) if link else page
            headings = re.findall(r"^#+ (.+)$", target.read_text(), re.M)
            assert anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}, link


def test_the_notebook_is_newest_first_and_its_index_has_every_entry():
    """Each title has a date and a verdict; a superseded entry names the entry that replaces it, as does the index."""
    index, _, entries = (ROOT / "docs/notebook.md").read_text().partition("\n## ")
    titles = re.findall(r"^## (.+)$", "## " + entries, re.M)
    dates = [re.fullmatch(r"(\d{4}-\d\d-\d\d) .+ \((?:works|negative|mixed|measured)\)", title)[1] for title in titles]
    assert dates == sorted(dates, reverse=True)
    anchors = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]
    rows = re.findall(r"^\| (\d{4}-\d\d-\d\d) \| \[.+?\]\(#(.+?)\) \| .+ \|$", index, re.M)
    assert rows == list(zip(dates, anchors, strict=True))
    assert index.count("; superseded (") == entries.count("\n*Superseded (")


def rows_of_models() -> list[tuple[str, list[str]]]:
    """Return (setting, names) for each row of the README's table of models."""
    section = (ROOT / "README.md").read_text().partition("\n## Models\n")[2].partition("\n## ")[0]
    cells = [row.split("|")[2:4] for row in re.findall(r"^\| \w.*$", section, re.M)]
    return [(re.search("`(.+)`", setting)[1], re.findall("`(.+?)`", names)) for setting, names in cells]


def test_the_readme_lists_every_mixer_and_every_rule():
    listed = {}
    for setting, names in rows_of_models():
        assert load_config("quickstart", [word.replace("NAME", (names or [""])[0]) for word in shlex.split(setting)])
        listed.setdefault(setting, []).extend(names)
    # Without mixers and rules that other tests have registered in this process.
    mixers, rules = ({name for name in kind.names() if kind.find(name).__module__.startswith("titans_pt.")}
                     for kind in (MIXERS, RULES))  # fmt: skip
    only_by_conversion = {"mab", "liza"}
    assert sorted(listed["'model.mixers=[NAME]'"]) == sorted(mixers - only_by_conversion)
    assert sorted(listed["model.memory.rule=NAME"]) == sorted(rules)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_make_targets_exist(page):
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^ *make (\w+)|`make (\w+)", page.read_text(), re.M):
        target = "".join(target)
        assert re.search(rf"^{target}:", makefile, re.M), target


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_yaml_blocks_are_valid_settings(page, tmp_path):
    for i, block in enumerate(re.findall(r"^( *)```yaml\n(.*?)^ *```", page.read_text(), re.M | re.S)):
        path = tmp_path / f"{i}.yaml"
        text = "".join(line.removeprefix(block[0]) for line in block[1].splitlines(keepends=True))
        (tmp_path / "run.yaml").write_text("data: {tokenizer: {path: tokenizer.json}}\n")  # for a run of the reader's
        text = re.sub(r"^inherit: runs/.*", f"inherit: {tmp_path}/run.yaml", text, flags=re.M)
        path.write_text(re.sub(r"^inherit: (?!/)", f"inherit: {ROOT}/", text, flags=re.M))
        load_config(path)


# ---- the names of the models

MEANT = {"LMM": "long-term memory alone", "MAC": "memory as context", "MAG": "memory as gate", "MAL": "memory as layer"}
SPELLED = [ROOT / name for name in ("README.md", "docs/models.md", "docs/recall.md", "docs/evaluation.md",
                                    "docs/settings.md")]  # fmt: skip


@pytest.mark.parametrize("page", SPELLED, ids=lambda p: p.name)
def test_names_of_models_are_spelled_out_where_they_first_stand(page):
    text = " ".join(page.read_text().split())
    for name, meant in MEANT.items():
        if first := re.search(rf"\b{name}\b", text):
            assert meant in text[first.start() : first.end() + 60], (page.name, name)


def test_every_variable_of_our_own_is_explained():
    """Variables are TITANS_NAME, as a literal in code and scripts, or built from NAME by the launcher."""
    page = (ROOT / "docs/troubleshooting.md").read_text()
    told = set(re.findall(r"`(TITANS_[A-Z]+)`", page[page.index("## Environment variables") :]))
    launcher = (ROOT / "titans_pt/training/launcher.py").read_text()
    read = {f"TITANS_{name}" for name in re.findall(r'(?:variable|_number)\(\w+(?:\.\w+)?, "([A-Z]+)"', launcher)}
    for folder in ("titans_pt", "kernels", "data_pipeline", "launch"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".sh"):
                read |= set(re.findall(r"\bTITANS_[A-Z]+\b", path.read_text()))
    assert told == read - {"TITANS_NAME"}, "docs/troubleshooting.md lists them"
