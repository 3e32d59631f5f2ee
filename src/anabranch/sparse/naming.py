"""What a bucket that travels sparsely names: the exchange and its density, such as "oktopk:0.01"."""

KIND = "oktopk"
LADDER = (0.01, 0.02, 0.05, 0.1, 0.2)  # the densities that "auto" chooses from


def kind_of(density: float) -> str:
    """What a bucket of this density names."""
    return f"{KIND}:{density:g}"


def density_of(kind: str) -> float | None:
    """The density in such a name; None if it is no sparse kind."""
    name, _, text = kind.partition(":")
    if name != KIND:
        return None
    try:
        density = float(text)
    except ValueError:
        return None
    return density if 0 < density <= 1 else None


def given_density(text: str) -> float:
    """The density after the colon of what --compress was given; ValueError if there is none."""
    name, _, share = text.partition(":")
    try:
        density = float(share)
    except ValueError:
        density = 0.0
    if not 0 < density <= 1:
        raise ValueError(f"--compress is {text!r}: expected a density in (0, 1], such as {name}:0.01")
    return density
