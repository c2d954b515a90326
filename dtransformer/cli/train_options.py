"""The options of `dtransformer train`."""


def add_train(commands) -> None:
    """Add the command to argparse's subparsers."""
    train = commands.add_parser("train", help="train a translation model")
    train.add_argument("--config", required=True, help="a YAML file")
    train.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE",
        help="replace values of the config, such as training.epochs=3",
    )  # fmt: skip
    train.add_argument("--run", help="the run folder; runs/NAME-OF-THE-CONFIG by default")
    again = train.add_mutually_exclusive_group()
    again.add_argument("--overwrite", action="store_true", help="replace a run that is there")
    again.add_argument(
        "--resume", action="store_true", help="go on from the run's newest checkpoint, if any"
    )
