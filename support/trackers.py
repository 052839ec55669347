"""TensorBoard and Weights & Biases, beside a run's log. A fault of theirs never costs a run."""

import os

from support.script import first_line, print0, warn


def open_trackers(config: dict, metadata: dict, first_step: int | None) -> dict[str, tuple]:
    """Return {name: (write(record), close())} for TensorBoard and Weights & Biases, where settings
    ask for them. Both get the settings, and the numbers of each record. first_step: of a resumed
    run; TensorBoard hides what it wrote before from there on. The id of a run of Weights & Biases
    is kept in `metadata`. A tracker that cannot be opened is left out, with a warning."""
    openers = {'tensorboard': open_tensorboard, 'wandb': open_wandb}
    trackers = {}
    for name in [name for name in openers if config[name]]:
        try:
            trackers[name] = openers[name](config, metadata, first_step)
        except Exception as error:  # noqa: BLE001  a tracker must never end a run
            warn(f'{name} is switched off: {first_line(error)}')
    return trackers


def numbers_in(record: dict) -> dict[str, float]:
    """Return the entries of a record that are numbers."""
    return {name: x for name, x in record.items() if isinstance(x, (int, float))}


def open_tensorboard(config: dict, metadata: dict, first_step: int | None) -> tuple:
    """Return write(record) and close() for TensorBoard files in the run's folder."""
    from torch.utils.tensorboard import SummaryWriter

    board = SummaryWriter(config['out_dir'], purge_step=first_step)
    board.add_text('settings', '\n'.join(f'    {k} = {v!r}' for k, v in config.items()))

    def write(record: dict) -> None:
        for name, x in numbers_in(record).items():
            board.add_scalar(name, x, record['step'])

    return write, board.close


def open_wandb(config: dict, metadata: dict, first_step: int | None) -> tuple:
    """Return write(record) and close() for a run of Weights & Biases, with which a resumed run goes
    on. A copy of a run's folder gets a run of its own."""
    import wandb

    options = {
        'project': config['wandb_project'],
        'name': config['out_dir'],
        'config': dict(config),
    }
    path, former = os.path.realpath(config['out_dir']), metadata.get('wandb_id')
    if first_step is not None and former and 'WANDB_RUN_ID' not in os.environ:
        folder = metadata.get('wandb_folder', 'an unknown folder')
        if folder == path:
            options |= {'id': former, 'resume': 'allow'}
        else:
            advice = (
                f'if it was only moved, WANDB_RUN_ID={former} WANDB_RESUME=allow keeps {former}'
            )
            print0(f'wandb: a new run, because {path} is a copy of {folder}; {advice}')
    run = wandb.init(dir=config['out_dir'], **options)
    metadata |= {'wandb_id': run.id, 'wandb_folder': path}

    def write(record: dict) -> None:
        run.log(numbers_in(record), step=record['step'])

    return write, run.finish
