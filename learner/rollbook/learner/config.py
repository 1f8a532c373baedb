"""The learner's settings. Names follow AReaL where it has one, so that its YAML files read the same.

A setting is a field with a default and one sentence. `None` mostly means "what the algorithm's recipe says"; a value
always wins over the recipe. The app composes the whole config of a run by subclassing `TrainConfig` with the
settings of the other rooms (`gconfig`, `rollout`); unknown keys are refused when the file is read.
"""

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from .errors import BadSetting

Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
BelowOne = Annotated[float, Meta(ge=0, lt=1)]
Count = Annotated[int, Meta(ge=1)]
Whole = Annotated[int, Meta(ge=0)]
Seed = Annotated[int, Meta(ge=0, le=2**62)]
Level = Literal["batch", "group"]


class Settings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A section of the config file."""


class OptimizerConfig(Settings):
    """AdamW over fp32 master weights, and its schedule."""

    type: Literal["adamw", "adam", "sgd"] = "adamw"  # the update rule
    lr: NotNegative = 1e-5  # peak learning rate
    weight_decay: NotNegative = 0.01  # decoupled; not applied to biases and norms
    beta1: BelowOne = 0.9  # decay of the first moment
    beta2: BelowOne = 0.999  # decay of the second moment
    eps: NotNegative = 1e-8  # added to the root of the second moment
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"  # shape after the warm-up
    warmup_steps_proportion: Share = 0.001  # share of all steps in which the rate rises from 0
    min_lr_ratio: Share = 0.0  # the rate never falls below this share of the peak
    gradient_clipping: NotNegative = 1.0  # largest global gradient norm; 0 switches clipping off


class MicroBatchSpec(Settings):
    """How a batch is cut for memory. The loss does not depend on it."""

    max_tokens_per_mb: Count = 32768  # tokens computed at once, shared tokens counted once; a longer path stands alone
    n_mbs: Count = 1  # at least this many micro-batches


class NormConfig(Settings):
    """Shift by a mean and divide by a standard deviation, each over a batch, a group or not at all."""

    mean_level: Level | None = "group"  # whose mean is subtracted; null: none
    std_level: Level | None = "group"  # whose deviation divides; null: none
    mean_leave1out: bool = False  # the mean of the others (RLOO)
    std_unbiased: bool = True  # divide by n-1 in the deviation
    eps: NotNegative = 1e-6  # added to the deviation


class RejectionConfig(Settings):
    """What happens to tokens whose proximal policy is far from the one that sampled them (decoupled loss)."""

    level: Literal["token", "sequence"] = "token"  # judge each token, or each interaction as a whole
    action: Literal["mask", "clamp"] = "clamp"  # leave out, or cap the weight
    metric: Literal["ratio", "kl_k1", "kl_k2", "kl_k3"] = "ratio"  # what is compared with the bounds
    agg: Literal["sum", "mean", "max"] = "mean"  # how a sequence's tokens become one number
    upper: float | None = 2.0  # largest accepted value; null: no bound
    lower: float | None = None  # smallest accepted value; null: no bound


class LoraConfig(Settings):
    """Train low-rank adapters instead of all weights (peft)."""

    r: Count = 16  # rank
    alpha: Count = 32  # scale is alpha / r
    dropout: BelowOne = 0.0  # on the adapter's input
    target_modules: list[str] | str = "all-linear"  # module names, or peft's keyword for every linear layer


class ModelConfig(Settings):
    """A transformers causal language model and how it is computed."""

    path: str = ""  # folder or hub name of the model
    dtype: Literal["bfloat16", "float16", "float32", "float64"] = (
        "bfloat16"  # of the computation; master weights stay float32
    )
    attn_impl: Literal["auto", "sdpa", "eager", "plain"] = (
        "auto"  # attention kernel; auto: the fastest that agrees with the model; plain: no tries, the model's own
    )
    init_from_scratch: bool = False  # random weights from the folder's config
    gradient_checkpointing: bool = False  # compute activations again instead of keeping them
    disable_dropout: bool = True  # a learner that drops out disagrees with its own engine
    mb_spec: MicroBatchSpec = msgspec.field(default_factory=MicroBatchSpec)  # memory
    backend: str = "single"  # single: one process; fsdp:dN: N processes of a GPU each; ref and critic follow the actor
    gather_once: bool | None = (
        None  # several ranks: weights gathered and gradients summed once a step; null: where memory allows
    )
    device: str = "auto"  # auto: the GPU if there is one
    compile: bool = False  # torch.compile the decoder layers


class CriticConfig(ModelConfig):
    """The value model of PPO."""

    optimizer: OptimizerConfig = msgspec.field(default_factory=OptimizerConfig)  # its own optimiser
    value_eps_clip: NotNegative = 0.5  # values move at most this far from the old ones within a step; 0: no clip
    value_loss_type: Literal["mse", "huber"] = "mse"  # of value against return


class ActorConfig(ModelConfig):
    """The policy and its objective."""

    optimizer: OptimizerConfig = msgspec.field(default_factory=OptimizerConfig)  # of the policy
    lora: LoraConfig | None = None  # null: all weights are trained
    temperature: Positive | None = None  # logprobs are those of this temperature; null: as each request was drawn

    weight_update_mode: Literal["disk"] = "disk"  # how engines get new weights

    # rewards
    reward_bias: float = 0.0  # added first
    reward_scaling: float = 1.0  # then multiplied
    reward_clip: Positive = 20.0  # then cut to +-this
    reward_norm: NormConfig | None = None  # over episodes; null: the recipe's
    adv_norm: NormConfig | None = None  # of advantages, after everything else; null: the recipe's
    overlong_reward_penalty: bool = False  # soft penalty near the length limit (DAPO)
    overlong_tokens: Whole = 0  # width of the zone before the limit in which the penalty grows
    overlong_penalty_factor: float = 1.0  # the penalty at the limit
    max_new_tokens: Count | None = None  # that limit; null: the engine's (gconfig)
    mask_no_eos: bool = False  # leave interactions that were cut by length out of the loss
    dynamic_sampling: bool | None = None  # leave groups whose rewards are all equal out; null: the recipe's
    dynamic_sampling_draws: Count | None = 10  # batches that a step draws at most for it, then it takes them; null: all

    # objective
    eps_clip: NotNegative = 0.2  # the ratio's lower clip 1-eps (and the upper, without the next)
    eps_clip_higher: NotNegative | None = None  # the ratio's upper clip 1+eps; null: the recipe's
    c_clip: Annotated[float, Meta(ge=1)] | None = (
        None  # dual clip: the loss of a negative advantage is at most c*|A|; null: off
    )
    importance_sampling_level: Literal["token", "sequence"] | None = None  # null: the recipe's (GSPO: sequence)
    loss_agg: Literal["token_mean", "sequence_mean", "fixed_length"] | None = None  # null: the recipe's
    fixed_length: Count | None = None  # the divisor per sequence of `fixed_length`; null: max_new_tokens
    entropy_coef: float = 0.0  # bonus on the mean entropy
    kl_ctl: NotNegative = 0.0  # KL to `ref` taken from each token's reward
    kl_loss_coef: NotNegative = 0.0  # KL to `ref` added to the loss
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"  # http://joschu.net/blog/kl-approx.html
    discount: Share = 1.0  # per token, in GAE
    gae_lambda: Share = 1.0  # per token, in GAE
    sapo_tau_pos: Positive = 1.0  # gate temperature where the advantage is positive
    sapo_tau_neg: Positive = 1.05  # and where it is negative
    m2_threshold: Positive = 0.04  # M2PO keeps tokens until their mean squared log-ratio is below this
    cispo_eps_max: NotNegative = 0.28  # CISPO's cap of the weight is 1 + this
    dpo_beta: Positive = 0.1  # DPO's inverse temperature
    best_of: float = 0.5  # best-of-n trains on episodes at or above this reward

    # off-policy
    ppo_n_minibatches: Count = 1  # optimiser steps per batch
    use_decoupled_loss: bool = True  # clip around the proximal policy and weigh by proximal / behaviour
    recompute_logprob: bool = True  # proximal logprobs from the weights at the start of the step
    prox_logp_method: Literal["recompute", "loglinear"] = (
        "recompute"  # or interpolated by version, without a forward pass
    )
    rejection_sampling: RejectionConfig | None = msgspec.field(
        default_factory=RejectionConfig
    )  # null: weights as they are
    max_staleness: Whole | None = None  # tokens older than this many versions are not trained; null: all are
    logprob_gap_warn: float = 0.2  # warn when engine and learner differ by more on average (nats per token)
    logprob_gap_stop: float = 2.0  # and stop the run here: one of them is wrong


class FrequencyConfig(Settings):
    """When something is done: any of the three that is set; none set: never."""

    freq_epochs: Whole | None = None  # every so many epochs
    freq_steps: Whole | None = None  # every so many steps
    freq_secs: Whole | None = None  # every so many seconds


class SaverConfig(FrequencyConfig):
    """Exports of the model for use elsewhere."""

    keep: Count = 3  # newest exports kept; the best evaluated version is kept beside them


class EvaluatorConfig(FrequencyConfig):
    """Episodes on the validation set, into the same book."""

    n_samples: Count = 1  # episodes per validation task


class RecoverConfig(FrequencyConfig):
    """Checkpoints from which a killed run goes on."""

    mode: Literal["auto", "disabled", "fault", "on", "off", "resume"] = (
        "auto"  # off/disabled: no checkpoints, start again
    )
    freq_steps: Whole | None = 1  # every step by default: a kill costs at most that much computing, never data
    keep: Count = 2  # newest checkpoints kept


class WandBConfig(Settings):
    """Weights & Biases."""

    mode: Literal["disabled", "offline", "online"] = "disabled"  # offline writes a folder to sync later
    project: str | None = None  # null: experiment_name
    entity: str | None = None  # account or team
    name: str | None = None  # null: trial_name
    tags: list[str] | None = None  # labels of the run


class TensorBoardConfig(Settings):
    """TensorBoard event files."""

    path: str | None = None  # folder; null: off


class StatsLoggerConfig(Settings):
    """Where metrics go besides the book. A JSON-lines file beside the checkpoints is always written."""

    wandb: WandBConfig = msgspec.field(default_factory=WandBConfig)  # Weights & Biases
    tensorboard: TensorBoardConfig = msgspec.field(default_factory=TensorBoardConfig)  # TensorBoard


class DatasetConfig(Settings):
    """Tasks."""

    path: str = ""  # file or dataset name; empty where the dataset is passed in code
    type: str | None = None  # name of a loader; null: by the file's ending
    batch_size: Count = 8  # groups per training step
    shuffle: bool = True  # a new order each epoch, a function of the seed
    max_length: Count | None = None  # tasks whose prompt is longer are left out
    curriculum: str | None = (
        None  # SQL for (task_id, weight) over the book, asked at each epoch's begin; null: all alike
    )


class ClusterConfig(Settings):
    """The machines."""

    n_nodes: int = 1  # hosts
    n_gpus_per_node: int = 0  # GPUs on each
    fileroot: str = "runs"  # books, policies and checkpoints live below this folder


class SchedulerConfig(Settings):
    """Who starts the other programs of a run."""

    type: str = "local"  # a name of the entry-point group rollbook.schedulers; `none`: train from the book alone


class SelectionConfig(Settings):
    """Which recorded rollouts a run without an engine trains on (scheduler.type: none)."""

    runs: list[str] | None = None  # run ids; null: every other run of the book
    where: str | None = None  # SQL condition over `episodes`, e.g. "version >= 10 and state = 'done'"


class CreditConfig(Settings):
    """How rewards are spread over the interactions of an episode; see the store's credit schemes."""

    scheme: Literal["tree", "broadcast", "arrival", "none"] = "tree"  # ancestry by default
    gamma: float = 1.0  # discount per turn
    fork: Literal["mean", "sum", "max"] = "mean"  # how branches of a fork add up
    reward: str | None = None  # name or expression of the reward; null: the episode's


class SamplesConfig(Settings):
    """The part of `gconfig` that the learner reads; the app puts the proxy's whole struct in its place."""

    n_samples: Count = 8  # episodes per group
    temperature: NotNegative = 1.0  # of sampling
    top_p: float = 1.0  # nucleus of sampling
    top_k: int = 0  # 0: all tokens
    max_new_tokens: Count | None = None  # per interaction


class LimitsConfig(Settings):
    """The part of `rollout` that the learner reads; the app puts the agents' whole struct in its place."""

    max_head_offpolicyness: Whole = 0  # versions that data may lag behind; 0: synchronous
    consumer_batch_size: Count | None = None  # groups per step; null: train_dataset.batch_size
    max_concurrent_rollouts: Count | None = None  # groups at once


class TrainConfig(Settings):
    """A training run."""

    experiment_name: str = "experiment"  # with trial_name: the folder of the run
    trial_name: str = "trial"  # the run_id is experiment_name/trial_name
    seed: Seed = 1  # of task order, samplers and weights
    algorithm: str = "grpo"  # a file of rollbook.learner.algorithms, or module.Name of yours
    total_train_epochs: Count = 1  # passes over the training set
    total_train_steps: Count | None = None  # stop here, if that is earlier
    tokenizer_path: str = ""  # folder or hub name; empty: actor.path
    book: str | None = None  # folder of the book, which several runs may share; null: below the run's own folder
    write_scores: bool = True  # write the learner's logprobs and entropies back to the book
    cluster: ClusterConfig = msgspec.field(default_factory=ClusterConfig)
    scheduler: SchedulerConfig = msgspec.field(default_factory=SchedulerConfig)
    gconfig: SamplesConfig = msgspec.field(default_factory=SamplesConfig)
    rollout: LimitsConfig = msgspec.field(default_factory=LimitsConfig)
    actor: ActorConfig = msgspec.field(default_factory=ActorConfig)
    ref: ModelConfig | None = None  # the policy that KL is measured against; null: none
    ref_scores: str | None = None  # or the name of stored scores (`rollbook rescore`) to measure against: no model
    critic: CriticConfig | None = None  # PPO's value model; null: none
    credit: CreditConfig = msgspec.field(default_factory=CreditConfig)
    selection: SelectionConfig = msgspec.field(default_factory=SelectionConfig)
    train_dataset: DatasetConfig = msgspec.field(default_factory=DatasetConfig)
    valid_dataset: DatasetConfig | None = None  # null: no evaluation
    saver: SaverConfig = msgspec.field(default_factory=SaverConfig)
    evaluator: EvaluatorConfig = msgspec.field(default_factory=EvaluatorConfig)
    recover: RecoverConfig = msgspec.field(default_factory=RecoverConfig)
    stats_logger: StatsLoggerConfig = msgspec.field(default_factory=StatsLoggerConfig)

    @property
    def is_online(self) -> bool:
        """Whether episodes come from outside, from an application that people use: then there are no tasks to draw."""
        return False

    @property
    def run_id(self) -> str:
        """The run's name in the book."""
        return f"{self.experiment_name}/{self.trial_name}"

    @property
    def run_path(self) -> str:
        """Folder of the run: its book, checkpoints, exports and metrics."""
        return f"{self.cluster.fileroot}/{self.experiment_name}/{self.trial_name}"

    @property
    def book_path(self) -> str:
        """The run's book."""
        return self.book or f"{self.run_path}/book"

    @property
    def groups_per_step(self) -> int:
        """Groups that one training step consumes."""
        return self.rollout.consumer_batch_size or self.train_dataset.batch_size


BOUNDS = frozenset({
    "actor.reward_clip", "actor.logprob_gap_warn", "actor.logprob_gap_stop", "actor.rejection_sampling.upper",
    "actor.optimizer.gradient_clipping", "critic.optimizer.gradient_clipping",
})  # fmt: skip
"""Where infinity says that there is none."""


def check(config: TrainConfig) -> None:
    """Raise BadSetting, naming it, for a value of the wrong type or range: a file's are looked at when it is read, a
    script's only here.
    """
    try:
        plain = msgspec.to_builtins(config)
        msgspec.convert(plain, type(config))
    except msgspec.ValidationError as error:
        what, _, path = str(error).rstrip("`").partition(" - at `$.")
        value: object = plain
        for name in path.split(".") if path else ():
            value = value.get(name) if isinstance(value, dict) else value
        raise BadSetting(f"{path}: {what[:1].lower()}{what[1:]}, got {value!r}" if path else what) from error
    except TypeError as error:  # an object that no file could hold
        raise BadSetting(
            f"the config holds what is no setting: {error}; settings are numbers, texts and lists"
        ) from error
    for path, number in _numbers(plain, ""):
        if math.isnan(number) or (math.isinf(number) and path not in BOUNDS):
            raise BadSetting(f"{path} is {number}; give it a finite number")
    rejection = config.actor.rejection_sampling
    if rejection is not None and rejection.action == "clamp" and rejection.metric != "ratio":
        raise BadSetting(
            f"actor.rejection_sampling: action clamp caps a ratio, and metric is {rejection.metric}; set action=mask"
        )
    lower, upper = (None, None) if rejection is None else (rejection.lower, rejection.upper)
    if lower is not None and upper is not None and lower > upper:
        raise BadSetting(f"actor.rejection_sampling.lower is {lower} and upper {upper}: no token lies between")
    for name in ("experiment_name", "trial_name"):
        said: str = getattr(config, name)
        if not said.strip("/ ") or ".." in said.split("/"):
            raise BadSetting(f"{name} is {said!r}; it names a folder below cluster.fileroot, so give it a plain name")
    if config.groups_per_step < 1:
        raise BadSetting(f"rollout.consumer_batch_size is {config.groups_per_step}; a step takes one group or more")


def _numbers(plain: Any, path: str) -> Iterator[tuple[str, float]]:
    """The settings that are floats, by path."""
    if isinstance(plain, float):
        yield path, plain
    elif isinstance(plain, dict):
        for name, value in plain.items():
            yield from _numbers(value, f"{path}.{name}" if path else name)
