"""A baseline that a user might choose instead: torch.nn.LSTM.

    python train_lm.py config/demo.py --arch=lstm --out_dir=out/demo_lstm

Tokens, schedule, validation and log are train_lm.py's; the optimizer is torch.optim.AdamW with
nanoGPT's betas. The LSTM reads streams and carries its state from chunk to chunk, as the recurrent
model does, and has as many parameters; it runs as torch provides it (cuDNN on a GPU). The standard
Transformer needs no file: it is the non-recurrent model with n_expert = 1.
"""

import math

from support.script import UserError

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model import IGNORED, LanguageModel, Loss, ModelConfig, build_model, check_targets
from support.export import PublishedModel
from support.run_folder import export_in, settings_of


class LSTM(nn.Module, PublishedModel, pipeline_tag='text-generation'):
    """An embedding, torch.nn.LSTM with one layer, and a linear head. The state is nn.LSTM's h and
    c, (1, B, hidden) each. At small sizes one wide layer is as good as two narrow ones, and faster.
    """

    recurrent = True
    stream_dims = (1, 1)  # the dimension of h and of c that counts streams
    cuda_graphs = False  # no chunk runs in parts
    overrides = frozenset()  # it has no Triton overrides
    tied = LanguageModel.tied
    num_params = LanguageModel.num_params

    def __init__(self, config: ModelConfig, hidden: int):
        super().__init__()
        V, D = config.vocab_size, config.n_embd
        self.config = config
        self.embedding = nn.Parameter(torch.empty(V, D).normal_())
        self.lstm = nn.LSTM(D, hidden, batch_first=True)
        bound = 1 / math.sqrt(hidden)  # as nn.Linear
        self.head = nn.Parameter(torch.empty(V, hidden).uniform_(-bound, bound))
        self.head_bias = nn.Parameter(torch.empty(V).uniform_(-bound, bound))
        with torch.no_grad():
            # Forget gates start open (Jozefowicz et al., 2015); gates are ordered i, f, g, o.
            self.lstm.bias_ih_l0[hidden : 2 * hidden] = 1

    def init_state(self, B: int) -> tuple[Tensor, Tensor]:
        """Return the zero state of B streams."""
        h, c = self.head.new_zeros(2, 1, B, self.lstm.hidden_size)
        return h, c

    def forward(
        self, idx: Tensor, targets: Tensor | None = None, state: tuple | None = None
    ) -> tuple:
        """Return logits (B, T, V) in fp32 or wider, or with targets the Loss; and the next state,
        detached. idx, targets: (B, T). Raises ValueError for targets of another shape."""
        check_targets(idx, targets)
        x, state = self.lstm(F.embedding(idx, self.embedding), state)  # (B, T, hidden)
        state = tuple(s.detach() for s in state)
        logits = F.linear(x, self.head, self.head_bias)  # (B, T, V)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if targets is None:
            return logits, state
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        return Loss(loss, loss.detach()), state

    def fits_one_graph(self, state: tuple, T: int) -> bool:
        """Return whether a chunk is one CUDA graph: no, cuDNN runs the LSTM."""
        return False

    def release(self) -> None:
        """Free nothing: an LSTM's chunks do not run in segments."""

    def param_groups(self) -> dict[str, list[nn.Parameter]]:
        """Return the parameters by name of the optimizer's groups in train_lm.py."""
        params = list(self.parameters())
        return {
            'lstm_matrices': [p for p in params if p.dim() > 1],
            'lstm_biases': [p for p in params if p.dim() < 2],
        }

    @classmethod
    def build(cls, metadata: dict) -> 'LSTM':
        """Return an LSTM for the entries of a config.json."""
        return build_lstm(ModelConfig(**metadata['model']), metadata['recurrent'])

    def entries(self) -> dict:
        """Return the entries of config.json that rebuild this model."""
        return {'arch': 'lstm', **LanguageModel.entries(self)}

    def flops_per_token(self) -> dict[str, float]:
        """Return the forward FLOPs per token of core and head: two per weight."""
        core = sum(w.numel() for name, w in self.lstm.named_parameters() if 'weight' in name)
        return {'core': 2.0 * core, 'head': 2.0 * self.head.numel()}


def match_hidden(V: int, D: int, target: int) -> int:
    """Return the hidden size with which an LSTM has about `target` parameters: the closest multiple
    of 8, which GPUs prefer, if that is within 1%, else the closest size."""

    def excess(h: int) -> float:
        """Return the relative difference from `target` at hidden size h."""
        return (V * D + 4 * h * (D + h + 2) + V * (h + 1)) / target - 1

    closest = min(range(1, 2**15), key=lambda h: abs(excess(h)))
    multiple = 8 * max(1, round(closest / 8))
    return multiple if abs(excess(multiple)) <= 0.01 else closest


def build_lstm(config: ModelConfig, recurrent: bool) -> LSTM:
    """Return an LSTM with as many parameters as RecurrentGPT has for the sizes in `config`. Raises
    UserError for recurrent = False."""
    if not recurrent:
        raise UserError("arch = 'lstm': needs --recurrent=True")
    with torch.device('meta'):  # only to count
        target = build_model(config, recurrent=True).num_params()['total']
    return LSTM(config, match_hidden(config.vocab_size, config.n_embd, target))


def load_model(folder: str, which: str, device: str = 'cpu') -> LanguageModel | LSTM:
    """Return the language model of a run or of an export, in fp32. Raises UserError."""
    metadata = settings_of(folder) or settings_of(export_in(folder))
    model_type = LSTM if metadata.get('arch') == 'lstm' else LanguageModel
    return model_type.load_trained(folder, which, device)
