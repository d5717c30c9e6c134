"""Publishing through the Hub's real client at a small Hub on loopback, and fetching back with the card's own commands."""

import base64
import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar
from urllib.parse import unquote, urlsplit

import pytest

import ppo_continuous_action_envpool_xla_jax_scan as ppo
from conftest import ROOT
from runs import SCRIPT, TINY, run_directories

pytest.importorskip("huggingface_hub")
sys.path.insert(0, str(ROOT / "extras"))

import huggingface_hub as hub
import publish
import yaml
from huggingface_hub import constants

PUBLISH = ROOT / "extras" / "publish.py"
TOKENS = {"Bearer hf_owner": "ann", "Bearer hf_stranger": "bob"}
REPO = r"([\w.-]+/[\w.-]+)"


class SmallHub(ThreadingHTTPServer):
    """A Hub of model repositories: make, list, commit, fetch. Text lies in commits, all else in large file storage."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.storage = f"http://localhost:{self.server_port}/objects"  # to the client another host, as the Hub's own is
        self.repos = {}  # {id: {"private": bool, "commits": [{path: (content, is it large)}]}}
        self.objects = {}  # {sha256: content}
        self.forbidden = None  # a pattern of requests to answer with 403
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def files(self, repo):
        return {path: content for path, (content, _) in self.repos[repo]["commits"][-1].items()}


class Refusal(Exception):
    """(status, message, the Hub's code of the error)"""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer_request(self):
        request = f"{self.command} {unquote(urlsplit(self.path).path)}"
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.user = TOKENS.get(self.headers.get("Authorization"))
        try:
            if self.server.forbidden and re.search(self.server.forbidden, request):
                raise Refusal(403, "this Hub forbids it", "")
            matches = ((re.fullmatch(pattern, request), answer) for pattern, answer in self.routes.items())
            match, answer = next(((match, answer) for match, answer in matches if match), (None, None))
            if not match:
                raise Refusal(404, f"no such route: {request}", "")
            status, headers, content = answer(self, *match.groups())
        except Refusal as refusal:
            status, message, code = refusal.args
            headers, content = {"X-Error-Message": message, "X-Error-Code": code}, {"error": message}
        content = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for key, value in ({"Content-Length": len(content)} | headers).items():
            self.send_header(key, str(value))
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else content)

    do_GET = do_HEAD = do_POST = do_PUT = answer_request

    def log_message(self, *_):
        pass

    def check_writer(self, owner):
        if not self.user:
            raise Refusal(401, "Invalid username or password.", "")
        if self.user != owner:
            raise Refusal(403, f"You don't have the rights to write to the namespace {owner}", "")

    def repo(self, name, writes=False):
        found = self.server.repos.get(name)
        if not found or (found["private"] and self.user != name.split("/")[0]):
            raise Refusal(404 if self.user else 401, "Repository not found", "RepoNotFound")
        if writes:
            self.check_writer(name.split("/")[0])
        return found

    def revision(self, name, revision="main"):
        """(its id, its files); revisions are numbered."""
        commits = self.repo(name)["commits"]
        number = len(commits) - 1 if revision == "main" else int(revision, 16)
        if not number < len(commits):
            raise Refusal(404, "Invalid rev id", "RevisionNotFound")
        return f"{number:040x}", commits[number]

    def create(self):
        asked = json.loads(self.body)
        owner = asked.get("organization") or self.user
        self.check_writer(owner)
        name = f"{owner}/{asked['name']}"
        url = {"url": f"{self.server.url}/{name}"}
        if name in self.server.repos:
            return 409, {}, url | {"error": "You already created this model repo"}
        private = asked.get("private") or asked.get("visibility") == "private"
        commits = [{".gitattributes": (b"*tfevents* filter=lfs\n", False)}]
        self.server.repos[name] = {"private": bool(private), "commits": commits}
        return 200, {}, url

    def validate(self):
        try:
            metadata = yaml.safe_load(json.loads(self.body)["content"].split("---\n")[1])
            for model in metadata["model-index"]:
                for result in model["results"]:
                    assert result["task"]["type"] and result["dataset"]["type"] and result["metrics"][0]["value"]
        except Exception as error:
            return 400, {}, {"errors": [{"message": repr(error)}], "warnings": []}
        return 200, {}, {"errors": [], "warnings": []}

    def info(self, name):
        commit, files = self.revision(name)
        siblings = [{"rfilename": path} for path in files]
        return 200, {}, {"id": name, "sha": commit, "private": self.repo(name)["private"], "siblings": siblings}

    def tree(self, name, revision):
        entries = []
        for path, (content, large) in self.revision(name, revision)[1].items():
            lfs = {"lfs": {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}}
            entries += [{"type": "file", "path": path, "size": len(content), "oid": blob_id(content)} | (lfs if large else {})]
        return 200, {}, entries

    def preupload(self, name):
        self.repo(name, writes=True)
        files = []
        for file in json.loads(self.body)["files"]:
            large = b"\0" in base64.b64decode(file["sample"])
            files += [{"path": file["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}]
        return 200, {}, {"files": files}

    def batch(self, name):
        self.repo(name, writes=True)
        objects = []
        for wanted in json.loads(self.body)["objects"]:
            actions = {"actions": {"upload": {"href": f"{self.server.storage}/{wanted['oid']}"}}}
            objects += [wanted | ({} if wanted["oid"] in self.server.objects else actions)]
        return 200, {}, {"transfer": "basic", "objects": objects}

    def upload(self, oid):
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise Refusal(400, "content is not what its name says", "")
        self.server.objects[oid] = self.body
        return 200, {}, {}

    def download(self, oid):
        return 200, {"ETag": f'"{oid}"'}, self.server.objects[oid]

    def commit(self, name):
        files = dict(self.revision(name)[1])
        for line in map(json.loads, self.body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"]), False
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.objects[value["oid"]], True
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        commits = self.repo(name, writes=True)["commits"]
        commits.append(files)
        oid = f"{len(commits) - 1:040x}"
        return 200, {}, {"commitUrl": f"{self.server.url}/{name}/commit/{oid}", "commitOid": oid}

    def resolve(self, name, revision, path):
        commit, files = self.revision(name, revision)
        if path not in files:
            raise Refusal(404, "Entry not found", "EntryNotFound")
        content, large = files[path]
        headers = {"X-Repo-Commit": commit, "ETag": f'"{blob_id(content)}"'}
        if not large:
            return 200, headers, content
        oid = hashlib.sha256(content).hexdigest()
        linked = {"X-Linked-Etag": f'"{oid}"', "X-Linked-Size": len(content)}
        return 302, headers | linked | {"Location": f"{self.server.storage}/{oid}"}, b""

    routes: ClassVar = {
        "POST /api/repos/create": create,
        "POST /api/validate-yaml": validate,
        rf"GET /api/models/{REPO}(?:/revision/main)?": info,
        rf"GET /api/models/{REPO}/tree/(\w+)": tree,
        rf"POST /api/models/{REPO}/preupload/main": preupload,
        rf"POST /api/models/{REPO}/commit/main": commit,
        rf"POST /{REPO}\.git/info/lfs/objects/batch": batch,
        r"PUT /objects/(\w{64})": upload,
        r"(?:GET|HEAD) /objects/(\w{64})": download,
        rf"(?:GET|HEAD) /{REPO}/resolve/(\w+)/(.+)": resolve,
    }


def blob_id(content):
    """Git's name of a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@pytest.fixture
def server():
    with SmallHub() as server:
        yield server
        server.shutdown()


@pytest.fixture
def client(server, monkeypatch, tmp_path):
    """The client in this process, as the owner, at the small Hub. Its other storage, Xet, is not HTTP alone."""
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no token here"))
    monkeypatch.setenv("HF_TOKEN", "hf_owner")
    return monkeypatch


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The model file of a real run."""
    cwd = tmp_path_factory.mktemp("trained")
    with contextlib.chdir(cwd):
        assert ppo.main([*TINY, "--env-id", "InvertedPendulum-v4"]) == 0
    return next(run_directories(cwd)[0].glob("*.cleanrl_model"))


@pytest.fixture
def model(trained, tmp_path):
    """A copy of the run, to change, with an older and a newer film."""
    run_name = trained.parent.name
    shutil.copytree(trained.parent, tmp_path / "runs" / run_name)
    films = tmp_path / "videos" / run_name
    films.mkdir(parents=True)
    for age, name in ((10, "step-512.mp4"), (1000, "step-64.mp4")):
        (films / name).write_bytes(b"\0film " + name.encode())
        os.utime(films / name, (films.stat().st_mtime - age,) * 2)
    return tmp_path / "runs" / run_name / trained.name


def edit_summary(model, **changes):
    path = model.parent / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def read_card(server, repo, tmp_path):
    (tmp_path / "card.md").write_bytes(server.files(repo)["README.md"])
    return hub.ModelCard.load(tmp_path / "card.md")


def environment(server, tmp_path):
    """Of a process that knows the small Hub alone, and finds this Python and its `hf` first."""
    (tmp_path / "bin").mkdir()
    for name, arguments in (("python", ""), ("hf", "-c 'from huggingface_hub.cli.hf import main; main()'")):
        (tmp_path / "bin" / name).write_text(f'#!/bin/sh\nexec {sys.executable} {arguments} "$@"\n')
        (tmp_path / "bin" / name).chmod(0o755)
    env = {"HF_ENDPOINT": server.url, "HF_TOKEN": "hf_owner", "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
    env |= {"HF_HUB_DISABLE_UPDATE_CHECK": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "no_proxy": "127.0.0.1,localhost"}
    return os.environ | env | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}


def test_the_cards_commands_fetch_the_agent_and_evaluate_it_to_the_cards_score(server, model, tmp_path):
    env, cwd = environment(server, tmp_path), tmp_path / "elsewhere"
    cwd.mkdir()
    pipes = dict(cwd=cwd, env=env, capture_output=True, text=True, timeout=120)
    ended = subprocess.run([sys.executable, PUBLISH, model, "--repo", "pendulum"], **pipes)
    assert ended.returncode == 0 and ended.stderr == ""
    assert ended.stdout == f"published at {server.url}/ann/pendulum\n"

    commands = re.search(r"```bash\n(.*?)```", read_card(server, "ann/pendulum", tmp_path).text, re.S)[1].splitlines()
    offline = [command for command in commands if not command.startswith("pip install ")]
    assert len(commands) == len(offline) + 2
    del env["HF_TOKEN"]  # anybody may
    ended = subprocess.run(["bash", "-ec", "\n".join(offline)], **pipes)
    assert ended.returncode == 0, ended.stderr
    fetched = {path.name: path.read_bytes() for path in (cwd / "pendulum").iterdir() if path.is_file()}
    assert fetched == server.files("ann/pendulum")
    evaluation = json.loads((model.parent / "summary.json").read_text())["evaluation"]
    assert json.loads(ended.stdout.splitlines()[-1]) == evaluation


def test_model_script_requirements_log_and_newest_film_are_published(client, server, model):
    log = next(model.parent.glob("events.out.tfevents.*"))
    assert publish.main([str(model), "--repo", "ann/pendulum"]) == 0
    files = server.files("ann/pendulum")
    assert files.pop("README.md") and files.pop(".gitattributes")
    expected = {path.name: path.read_bytes() for path in (model, SCRIPT, ROOT / "requirements.txt", ROOT / "LICENSE", log)}
    assert files == expected | {"replay.mp4": b"\0film step-512.mp4"}
    assert len(server.repos["ann/pendulum"]["commits"]) == 2  # the first is the Hub's own


def test_card_holds_score_hyperparameters_versions_and_commit(client, server, model, tmp_path):
    evaluation = json.loads((model.parent / "summary.json").read_text())["evaluation"]
    sampled = {"mean": 123.456, "std": 7.891, "episodes": 10, "deterministic": False}
    edit_summary(model, commit="c0ffee", evaluation=evaluation | sampled)
    assert publish.main([str(model), "--repo", "ann/pendulum"]) == 0
    card = read_card(server, "ann/pendulum", tmp_path)
    (result,) = card.data.eval_results
    assert (result.metric_type, result.metric_value) == ("mean_reward", "123.46 +/- 7.89")
    assert (result.task_type, result.dataset_type) == ("reinforcement-learning", "InvertedPendulum-v4")
    assert card.data.library_name == "cleanrl" and "InvertedPendulum-v4" in card.data.tags
    assert "**123.46 ± 7.89**" in card.text and "sampled actions (episodes: 10)" in card.text and "512 steps" in card.text
    for row in ("num_envs | 4", "total_timesteps | 512", "gamma | 0.99", "env_id | InvertedPendulum-v4", "commit | c0ffee"):
        assert f"| {row} |\n" in card.text
    assert re.search(r"\| jax \| \d+\.\d+", card.text) and "wandb" not in card.text


@pytest.mark.parametrize("changes", [{"global_step": 448}, {"status": "stopped"}, {"evaluation": None}, None], ids=str)
def test_file_without_an_evaluation_of_its_own_is_evaluated(changes, client, server, model, tmp_path):
    evaluation = json.loads((model.parent / "summary.json").read_text())["evaluation"]
    edit_summary(model, **{"evaluation": evaluation | {"mean": -1.0}} | (changes or {}))
    if changes is None:
        (model.parent / "summary.json").unlink()
    assert publish.main([str(model), "--repo", "pendulum"]) == 0
    (result,) = read_card(server, "ann/pendulum", tmp_path).data.eval_results
    assert result.metric_value == f"{evaluation['mean']:.2f} +/- {evaluation['std']:.2f}"


def test_publishing_again_replaces_model_log_and_film_and_nothing_else(client, server, model):
    assert publish.main([str(model), "--repo", "pendulum"]) == 0
    notes = hub.CommitOperationAdd("notes.txt", b"mine")
    hub.HfApi().create_commit("ann/pendulum", [notes], commit_message="Notes")
    before = server.files("ann/pendulum")
    shutil.rmtree(model.parents[2] / "videos")
    model = model.rename(model.with_name("other.cleanrl_model"))
    next(model.parent.glob("events.out.tfevents.*")).rename(model.with_name("events.out.tfevents.2"))
    assert publish.main([str(model), "--repo", "pendulum"]) == 0
    after = server.files("ann/pendulum")
    gone = {name for name in before if name.endswith((".cleanrl_model", ".mp4")) or "tfevents" in name}
    assert len(gone) == 3
    assert set(after) == set(before) - gone | {"other.cleanrl_model", "events.out.tfevents.2"}
    assert after["notes.txt"] == b"mine"


def test_private_repository_is_hidden_from_others(client, server, model):
    assert publish.main([str(model), "--repo", "pendulum", "--private"]) == 0
    assert hub.HfApi().model_info("ann/pendulum").private
    client.setenv("HF_TOKEN", "hf_stranger")
    with pytest.raises(hub.errors.RepositoryNotFoundError):
        hub.HfApi().model_info("ann/pendulum")


def fault(capsys, *argv):
    """The one line that a failed command prints."""
    capsys.readouterr()
    assert publish.main([str(word) for word in argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and captured.err.startswith("publish.py: ")
    return captured.err


def test_private_is_refused_for_a_repository_that_is_public(client, server, model, capsys):
    hub.HfApi().create_repo("pendulum")
    assert "exists already and is public" in fault(capsys, model, "--repo", "pendulum", "--private")
    assert set(server.files("ann/pendulum")) == {".gitattributes"}


@pytest.mark.parametrize("repo", ["a/b/c", "-pendulum", "pen dulum", "pendulum.git", ""])
def test_bad_repository_name_is_one_line(repo, client, server, model, capsys):
    assert f"repo={repo}: " in fault(capsys, model, f"--repo={repo}")
    assert not server.repos


def test_bad_file_is_one_line_and_makes_no_repository(client, server, model, capsys):
    assert "cannot be read" in fault(capsys, model.with_name("none.cleanrl_model"), "--repo", "pendulum")
    assert "not a model file" in fault(capsys, SCRIPT, "--repo", "pendulum")
    for summary in ('{"status": "fin', '["finished"]', "1"):
        (model.parent / "summary.json").write_text(summary)
        assert "summary.json: not a run's summary" in fault(capsys, model, "--repo", "pendulum")
    model.write_bytes(model.read_bytes()[:-1])
    assert "not a model file, or not all of one" in fault(capsys, model, "--repo", "pendulum")
    assert not server.repos


def test_missing_invalid_and_foreign_tokens_are_one_line(client, server, model, capsys):
    client.setenv("HF_TOKEN", "hf_nobody")
    assert "the token may not write there" in fault(capsys, model, "--repo", "ann/pendulum")
    client.setenv("HF_TOKEN", "hf_stranger")
    assert "the token may not write there" in fault(capsys, model, "--repo", "ann/pendulum")
    client.delenv("HF_TOKEN")
    assert "hf auth login" in fault(capsys, model, "--repo", "ann/pendulum")
    assert not server.repos


def test_unreachable_hub_is_one_line(client, server, model, capsys):
    server.shutdown()
    server.server_close()
    assert f"not published at {server.url}: " in fault(capsys, model, "--repo", "pendulum")


@pytest.mark.parametrize("request_", ["validate-yaml", "preupload", "lfs/objects", "PUT /objects", "commit/main"])
def test_failure_on_the_way_commits_nothing_and_leaves_nothing_here(request_, client, server, model, capsys, tmp_path):
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    client.chdir(tmp_path)
    client.setenv("TMPDIR", str(tmp_path))
    server.forbidden = request_
    assert "not published" in fault(capsys, model, "--repo", "pendulum")
    assert set(server.files("ann/pendulum")) == {".gitattributes"}
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize("argv", [[], ["FILE"], ["FILE", "--repo", "x", "--public"]], ids=str)
def test_bad_command_line_is_one_line(argv, capsys):
    with pytest.raises(SystemExit) as ended:
        publish.main(argv)
    assert ended.value.code == 2 and capsys.readouterr().err.count("\n") == 1
