"""See the package `areal`."""

from rollbook.agents.config import AgentConfig, RolloutConfig
from rollbook.app.areal_compat import load_expr_config, missing
from rollbook.app.config import GRPOConfig, PPOConfig
from rollbook.learner.config import ActorConfig as PPOActorConfig
from rollbook.learner.config import ClusterConfig as ClusterSpecConfig
from rollbook.learner.config import DatasetConfig, NormConfig, OptimizerConfig, SchedulerConfig
from rollbook.proxy.config import GenerationHyperparameters

InferenceEngineConfig = RolloutConfig

__all__ = [
    "AgentConfig",
    "ClusterSpecConfig",
    "DatasetConfig",
    "GRPOConfig",
    "GenerationHyperparameters",
    "InferenceEngineConfig",
    "NormConfig",
    "OptimizerConfig",
    "PPOActorConfig",
    "PPOConfig",
    "SchedulerConfig",
    "load_expr_config",
]


def __getattr__(name: str) -> object:
    raise missing(__name__, name, __all__)
