"""``kvblend store``, and pruning."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from blend.errors import StoreError
from blend.stores import Store, entry
from blend.stores.disk import DiskStore
from blend.stores.listing import Listed, listing
from blend.stores.memory import MemoryStore
from blend.stores.prune import Pruned, prune
from blend.testing.stores import tiny_kv
from eval.store_cli import app, list_store, prune_store, verify_store


@pytest.fixture(params=["memory", "disk"])
def store(request, tmp_path):
    with MemoryStore() if request.param == "memory" else DiskStore(tmp_path / "kv", sync=False) as store:
        yield store


@pytest.fixture
def disk(tmp_path):
    with DiskStore(tmp_path / "kv", sync=False) as store:
        yield store


@pytest.fixture
def console():
    return Console(record=True, width=120)


def fill(store, **counts):
    """So many entries of each model."""
    for model, count in counts.items():
        for number in range(count):
            store.put(replace(tiny_kv(f"{model}{number}"), fingerprint=model))


def put_of_another_version(store, key):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entry, "FORMAT_VERSION", 1)
        store.put(tiny_kv(key))


def damage(store, key):
    """Flips the last byte of an entry's file: its head is still whole."""
    path = next(path for path in store.folder.glob("??/*.safetensors") if path.stem == key)
    whole = bytearray(path.read_bytes())
    whole[-1] ^= 1
    path.write_bytes(whole)


class Blind(Store):
    """Another store's verbs, and nothing beside them."""

    def __init__(self, inner):
        self.inner, self.stats = inner, inner.stats

    def get(self, key):
        return self.inner.get(key)

    def get_many(self, keys, *, layerwise=False):
        return self.inner.get_many(keys, layerwise=layerwise)

    def put(self, kv):
        return self.inner.put(kv)

    def delete(self, key):
        return self.inner.delete(key)

    def __contains__(self, key):
        return key in self.inner

    def keys(self):
        return self.inner.keys()


# --- pruning ------------------------------------------------------------------------------------------


def test_only_the_named_models_stay(store):
    fill(store, old=3, new=2, other=1)
    sizes = {found.key: found.nbytes for found in listing(store)}
    freed = sum(nbytes for key, nbytes in sizes.items() if key.startswith("old"))
    would = prune(store, {"new", "other"}, dry_run=True)
    assert would == Pruned(3, 3, 0, freed)
    assert len(list(store.keys())) == 6, "a dry run removes nothing"
    assert prune(store, {"new", "other"}) == would
    assert sorted(store.keys()) == ["new0", "new1", "other0"]
    assert prune(store, {"new", "other"}) == Pruned(3, 0, 0, 0)
    assert prune(store, set()).removed == 3


def test_other_format_versions_go(disk):
    fill(disk, model=2)
    put_of_another_version(disk, "model9")
    would = prune(disk, {"model"}, dry_run=True)
    assert (would.kept, would.removed, would.unusable) == (2, 0, 1)
    assert would.freed_bytes > 0
    assert "model9" in disk
    assert prune(disk, {"model"}) == would
    assert sorted(disk.keys()) == ["model0", "model1"]


def test_pruning_reads_heads_only(disk):
    disk.put(tiny_kv("aaa", rows=2000))
    damage(disk, "aaa")
    assert prune(disk, {"model"}) == Pruned(1, 0, 0, 0)
    assert disk.stats.bytes_read == 0
    assert disk.stats.corrupt == 0


def test_a_store_that_cannot_peek_is_asked(disk):
    """Then reading removes what is of another version, as everywhere; it is counted all the same."""
    blind = Blind(disk)
    fill(disk, old=1, new=1)
    put_of_another_version(disk, "model9")
    known = {found.key: found for found in listing(disk)}
    assert {found.key: found for found in listing(blind)} == {**known, "model9": Listed("model9", None, "", 0)}
    assert prune(blind, {"new"}) == Pruned(1, 1, 0, known["old0"].nbytes)
    assert list(disk.keys()) == ["new0"]


# --- the commands -------------------------------------------------------------------------------------


def test_ls_counts_by_model_and_codec(store, console):
    fill(store, old=3, new=2)
    told = list_store(store, console)
    assert {group: count for group, (count, _) in told.items()} == {("old", "none"): 3, ("new", "none"): 2}
    text = console.export_text()
    assert "5 entries" in text
    assert "old" in text


def test_ls_shows_and_keeps_what_is_not_usable(disk, console):
    put_of_another_version(disk, "model9")
    assert list(list_store(disk, console)) == [("not usable here", "?")]
    assert "model9" in disk


def test_verify_finds_what_is_damaged(disk, console):
    fill(disk, model=4)
    assert verify_store(disk, console)
    damage(disk, "model2")
    assert not verify_store(disk, console)
    assert "3 entries are whole" in console.export_text()
    assert verify_store(disk, console), "what was damaged is gone"


def test_prune_says_what_went(disk, console):
    fill(disk, old=3, new=2)
    prune_store(disk, {"new"}, console, dry_run=True)
    prune_store(disk, {"new"}, console)
    text = " ".join(console.export_text().split())
    assert "2 entries kept; 3 of other models and 0 of other format versions or damaged would be removed" in text
    assert "damaged removed" in text


def test_the_commands_from_outside(disk):
    fill(disk, old=3, new=2)
    url, runner = f"file://{disk.folder}", CliRunner()
    shown = runner.invoke(app, ["ls", url])
    assert shown.exit_code == 0, shown.output
    assert "5 entries" in shown.output
    assert runner.invoke(app, ["prune", url, "--fingerprint", "new", "--dry-run"]).exit_code == 0
    assert runner.invoke(app, ["prune", url, "--fingerprint", "new"]).exit_code == 0
    assert sorted(disk.keys()) == ["new0", "new1"]
    assert runner.invoke(app, ["verify", url]).exit_code == 0
    damage(disk, "new1")
    assert runner.invoke(app, ["verify", url]).exit_code == 1


def test_prune_wants_to_know_what_stays(disk):
    fill(disk, old=1)
    refused = CliRunner().invoke(app, ["prune", f"file://{disk.folder}"])
    assert isinstance(refused.exception, StoreError)
    assert "--model or --fingerprint" in str(refused.exception)
    assert "old0" in disk


def test_prune_by_the_name_of_a_model(disk, smollm2):
    """The entries that a model makes stay, those of another go."""
    from blend import Blender

    model, tokenizer = smollm2
    with Blender(model, tokenizer, check=False) as blender:
        fill(disk, **{blender.setup.fingerprint: 1}, old=1)
    run = CliRunner().invoke(app, ["prune", f"file://{disk.folder}", "--model", "smollm2"])
    assert run.exit_code == 0, run.output
    assert len(list(disk.keys())) == 1
    assert "old0" not in disk


@pytest.mark.parametrize("url", ["{}", "file://{}", "file://{}?limit=1GiB"])
def test_looking_after_a_folder_that_is_not_there_makes_none(tmp_path, url):
    folder = tmp_path / "typo"
    refused = CliRunner().invoke(app, ["ls", url.format(folder)])
    assert f"there is no folder {folder}" in str(refused.exception)
    assert not folder.exists()
