"""Recipes that cannot be read, or that hold something else than options."""

from collections.abc import Callable

from campaigns.inputs.case import Case, Place, Prepare, link_to_itself, train


def recipe(content: str | bytes) -> Prepare:
    return lambda place: train(place, "--recipe", place.file("recipe.yaml", content))


BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join(['*' + before] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
RECIPES: list[tuple[str, str | bytes, tuple[str, ...]]] = [
    ("open bracket", "lr: [1", ("line 1",)),
    ("tab", "optim:\n\tlr: 1", ("line 2",)),
    ("two colons", "lr: 1: 2", ("line 1",)),
    ("list", "- lr\n- 1", ("list",)),
    ("text", "just text", ("str",)),
    ("number", "42", ("int",)),
    ("two documents", "lr: 1\n---\nlr: 2", ("recipe.yaml",)),
    ("unknown version", "%YAML 9.9\n---\nlr: 1", ("recipe.yaml",)),
    ("undefined alias", "lr: *x", ("line 1",)),
    ("recursive alias", "reward: &a [*a]", ("--reward",)),
    ("alias bomb", BOMB + "reward: *i", ("recipe.yaml",)),
    ("python object", "lr: !!python/object/apply:os.getcwd []", ("line 1",)),
    ("list as key", "? [a]\n: 1", ("line 1",)),
    ("mapping as key", "{a: 1}: 1", ("line 1",)),
    ("null as key", "null: 1", ("None",)),
    ("number as key", "1: 2", ("'1'",)),
    ("boolean as key", "true: 1", ("True",)),
    ("key twice", "lr: 1\nlr: 2", ("'lr'", "twice")),
    ("key twice in section", "optim: {lr: 1, lr: 2}", ("'lr'", "twice")),
    ("flat and in section", "optim: {lr: 1.0e-3}\nlr: 1.0e-3", ("optim.lr", "twice")),
    ("unknown key", "learning_rat: 1", ("learning_rat",)),
    ("unknown section", "optimiser: {lr: 1}", ("optimiser",)),
    ("unknown key in section", "optim: {l: 1}", ("'l'", "optim")),
    ("number as section", "optim: 3", ("optim", "3")),
    ("list as section", "optim: [lr]", ("optim",)),
    ("merge of a number", "<<: 3", ("line 1",)),
    ("text as number", "lr: abc", ("--lr", "abc")),
    ("quoted number", "lr: '1e-3'", ("--lr",)),
    ("nan", "lr: .nan", ("--lr", "finite")),
    ("infinite", "lr: .inf", ("--lr", "finite")),
    ("negative", "lr: -1", ("--lr", "-1")),
    ("boolean as number", "lr: true", ("--lr", "True")),
    ("mapping as number", "lr: {}", ("--lr",)),
    ("date as text", "output_dir: 2020-01-01", ("--output-dir",)),
    ("fraction as integer", "num_rollout: 1.5", ("--num-rollout", "1.5")),
    ("5000 digits", "num_rollout: " + "9" * 5000, ("recipe.yaml",)),
    ("mapping as rewards", "reward: {a: 1}", ("reward", "'a'")),
    ("numbers as rewards", "reward: [1, 2]", ("--reward",)),
    ("no rewards", "reward: []", ("--reward",)),
    ("list as mapping", "chat_template_kwargs: [1]", ("--chat-template-kwargs",)),
    ("null in mapping", "chat_template_kwargs: {a: }", ("--chat-template-kwargs",)),
    ("number as key of a mapping", "chat_template_kwargs: {1: 2}", ("--chat-template-kwargs",)),
    ("deep list", "reward: " + "[" * 5000, ("recipe.yaml",)),
    ("deep mapping", "reward: " + "{a: " * 3000, ("recipe.yaml",)),
    ("2 MB", "# x\n" * 500_000, ("recipe.yaml", "bytes")),
    ("zeros", b"\0" * 100, ("recipe.yaml",)),
    ("binary", bytes(range(256)), ("recipe.yaml",)),
    ("utf-16", "lr: 1".encode("utf-16"), ("recipe.yaml",)),
    ("latin-1", "output_dir: caf\xe9".encode("latin-1"), ("recipe.yaml",)),
    ("control character", "output_dir: a\x07b", ("recipe.yaml",)),
]


def cases() -> list[Case]:
    cases = [Case("recipe", name, recipe(content), texts) for name, content, texts in RECIPES]

    def at(name: str, texts: tuple[str, ...], path: Callable[[Place], object]) -> None:
        cases.append(Case("recipe", name, lambda place: train(place, "--recipe", str(path(place))), texts))

    at("missing", ("nowhere.yaml",), lambda place: place.folder / "nowhere.yaml")
    at("folder", ("--recipe",), lambda place: place.folder)
    at("below a file", ("--recipe",), lambda place: place.file("a", "") + "/b.yaml")
    at("name too long", ("--recipe",), lambda place: place.folder / ("x" * 300))
    at("link to itself", ("--recipe",), lambda place: link_to_itself(place.folder / "loop"))
    at("endless device", ("--recipe /dev/zero",), lambda place: "/dev/zero")
    at("NUL in the name", ("--recipe",), lambda place: "a\0b")
    at("empty name", ("--recipe",), lambda place: "")
    return cases
