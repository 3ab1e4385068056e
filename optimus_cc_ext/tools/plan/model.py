"""A model and its layout on GPUs; contains sizes only, nothing measured."""

from argparse import Namespace
from dataclasses import dataclass, replace
from typing import Literal

from optimus_cc_ext.compressors.formats import EXACT_BITS
from optimus_cc_ext.config.presets import Layout, direct_of, row_width_of
from optimus_cc_ext.tools.plan import PlanError
from optimus_cc_ext.tools.plan.shapes import Model


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model on `gpus` GPUs. Ranks are numbered in Megatron's order: tensor, then data, then pipeline parallelism."""

    model: Model
    gpus: int
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    """Number of model chunks per stage."""

    cp: int = 1
    """Context-parallel size: the number of ranks that divide each sequence among them."""

    cp_exchange: Literal["p2p", "a2a", "allgather", "a2a+p2p"] = "p2p"
    ep: int = 1
    """Expert-parallel size: number of ranks over which the experts of a layer are dealt out."""

    etp: int = 1
    """Tensor-parallel size of the experts."""

    dispatcher: Literal["allgather", "alltoall", "flex", "deepep", "ncclep"] = "alltoall"
    """Megatron's dispatcher of tokens to experts. `flex` stands for HybridEP, `deepep` for DeepEP and `ncclep` for
    NCCL EP, which send a token once to each node.
    """

    expert_overlap: bool = False
    """True if the experts' exchange runs beside the passes of another micro-batch."""

    shared_expert_overlap: bool = False
    """True if the experts' exchange runs beside the shared experts' GEMMs."""

    embedding_slot: bool = False
    """True if the embedding counts as a layer when layers are dealt out to stages."""

    loss_slot: bool = False
    """True if the loss counts as a layer when layers are dealt out to stages."""

    stage_layers: tuple[int, ...] = ()
    """Number of layers of each stage, over all its chunks; empty: they are dealt out evenly."""

    micro_batch: int = 1
    batch: int
    recompute: Literal["none", "sel", "full"] = "none"
    recompute_layers: int = 0
    """Number of layers of each chunk that full recomputation computes once more (`--recompute-method block`); 0: all.
    """

    recomputed: tuple[str, ...] = ()
    """Modules that selective recomputation computes once more (`--recompute-modules`)."""

    sequence_parallel: bool = False
    precision: Literal["fp32", "fp16", "bf16", "fp8"] = "bf16"
    flash: bool = True
    """True for fused attention, which keeps no matrix of scores in memory and skips the causal half."""

    tp_overlap: bool = False
    """True if tensor-parallel transfers overlap with the GEMMs next to them (`--tp-comm-overlap`)."""

    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    fp8_gather: bool = False
    """True if parameters are gathered in one byte each (`--fp8-param-gather`)."""

    distributed_optimizer: bool = False
    instances: int = 1
    """Number of distributed-optimizer instances: runs of neighbouring replicas, each of which holds all shards."""

    exact_bits: float = EXACT_BITS
    """Bits of a value in exact messages, in the mean of the run."""

    gradient_bytes: int = 4
    """Bytes of one value in the gradient buffer; Megatron uses fp32 by default."""

    sums_in_fp32: bool = False
    """True if gradients in 16 bits are added up in fp32 (`--ddp-reduce-scatter-with-fp32-accumulation`)."""

    accumulation: Literal["fused", "added", "cast"] = "fused"
    """The way in which a micro-batch's gradient gets into the buffer: `fused`, added by the GEMM itself; `added`, by a
    kernel of its own (`--no-gradient-accumulation-fusion`); `cast`, by a kernel that casts and another that adds.
    """

    pipeline_before_data: bool = False
    """True if ranks are numbered tensor, pipeline, data (`--use-tp-pp-dp-mapping`), so that a node holds whole
    pipelines.
    """

    scatter_gather: bool = False
    """True if each tensor-parallel rank sends only its share of a message between stages. Older Megatrons do so
    (Narayanan et al. 2021, section 4.1); newer ones only with sequence parallelism.
    """

    @property
    def replica_stride(self) -> int:
        """The distance between the ranks of two neighbouring replicas of a stage, those of one sequence included."""
        return self.tp * (self.pp if self.pipeline_before_data else 1)

    def hop_crosses(self, stage: int, ranks_per_node: int) -> bool:
        """Return True if a stage's message to the next stage leaves a node; the last stage sends to the first one."""
        after = (stage + 1) % self.pp
        if self.gpus <= ranks_per_node:
            return False
        if not self.pipeline_before_data:
            ranks = self.gpus // self.pp
            return (stage * ranks) // ranks_per_node != (after * ranks) // ranks_per_node or ranks >= ranks_per_node
        # Pipelines begin at multiples of their length. After as many pipelines as a node has ranks, their positions on
        # nodes repeat.
        length = self.tp * self.pp
        firsts = range(0, min(self.gpus, length * ranks_per_node), length)
        places = ((first + stage * self.tp, first + after * self.tp) for first in firsts)
        return any(a // ranks_per_node != b // ranks_per_node for a, b in places)

    def senders(self, ranks_per_node: int) -> int:
        """Return the number of ranks of a node that send to the next stage over the network at the same time."""
        return min(self.tp if self.pipeline_before_data else self.gpus // self.pp, ranks_per_node)

    def __post_init__(self) -> None:
        for name in ("gpus", "tp", "pp", "vpp", "cp", "ep", "etp", "micro_batch", "batch", "instances"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name}: {getattr(self, name)} is not a positive number")
        model = self.model
        if min(model.layers, model.hidden, model.heads, model.sequence, model.vocabulary) < 1:
            raise PlanError("a model has a positive number of layers, hidden, heads, sequence and vocabulary")
        ranks = "tensor x pipeline ranks" if self.cp == 1 else "tensor x context x pipeline ranks"
        checks = [
            (self.gpus, self.tp * self.pp * self.cp, "GPUs", ranks),
            (model.heads, self.tp, "heads", "tensor ranks"),
        ]
        if not self.stage_layers:
            checks.append((self.slots, self.pp * self.vpp, "layers", "stages x chunks"))
        elif (len(self.stage_layers), sum(self.stage_layers)) != (self.pp, model.layers):
            raise PlanError(
                f"{sum(self.stage_layers)} layers on {len(self.stage_layers)} stages are laid out: the model has "
                f"{model.layers}, and the pipeline {self.pp}"
            )
        if not (model.head_size or model.latent):
            checks.append((model.hidden, model.heads, "hidden", "heads"))
        if self.cp > 1:
            checks.append((model.sequence, 2 * self.cp, "tokens of a sequence", "halves of context ranks"))
        if model.mixture:
            checks.append((model.mixture.experts, self.ep, "experts", "expert ranks"))
            checks.append((self.gpus, self.pp * self.ep * self.etp, "GPUs", "pipeline x expert x expert-tensor ranks"))
        elif self.ep > 1:
            raise PlanError("expert parallelism needs a model with experts: give --num-experts")
        if self.instances > 1:
            if not self.distributed_optimizer:
                raise PlanError("several instances of the distributed optimizer: give --use-distributed-optimizer")
            checks.append((self.replicas, self.instances, "replicas", "instances of the distributed optimizer"))
            checks.append((self.expert_replicas, self.instances, "replicas of experts", "instances of the optimizer"))
        for whole, part, name, parts in checks:
            if whole % part:
                raise PlanError(f"{whole} {name} do not divide among {part} {parts}")
        if self.batch % (self.micro_batch * self.dp):
            raise PlanError(
                f"a batch of {self.batch} does not divide among {self.dp} replicas x micro-batches of "
                f"{self.micro_batch}: give a multiple of {self.dp * self.micro_batch}"
            )
        if self.vpp > 1 and (self.pp == 1 or self.micro_batches % self.pp):
            raise PlanError(
                f"the interleaved schedule needs more than one stage ({self.pp}) and a number of micro-batches "
                f"({self.micro_batches}) that is a multiple of the stages"
            )

    @property
    def dp(self) -> int:
        """Number of data-parallel replicas."""
        return self.gpus // (self.tp * self.pp * self.cp)

    @property
    def replicas(self) -> int:
        """Number of ranks that hold the same parameters, and reduce their gradients: data x context parallelism."""
        return self.dp * self.cp

    @property
    def expert_replicas(self) -> int:
        """Number of ranks that hold the same routed experts."""
        return self.gpus // (self.pp * self.ep * self.etp)

    @property
    def expert_stride(self) -> int:
        """The distance between the ranks of two neighbouring replicas of the routed experts."""
        return self.ep * self.etp * (self.pp if self.pipeline_before_data else 1)

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches per replica and iteration."""
        return self.batch // (self.micro_batch * self.dp)

    @property
    def value_bytes(self) -> int:
        """Bytes of a parameter, and of a value sent between stages or tensor-parallel ranks."""
        return 4 if self.precision == "fp32" else 2

    @property
    def rows(self) -> int:
        """Number of a micro-batch's tokens on one context-parallel rank."""
        return self.micro_batch * self.model.sequence // self.cp

    @property
    def routed_rows(self) -> int:
        """Number of tokens that one rank sends to experts, counted once for each expert; 0 without a mixture."""
        return self.rows // self.tp * self.model.mixture.top_k if self.model.mixture else 0

    @property
    def slots(self) -> int:
        """Number of layers to deal out to stages, the embedding and the loss included if they count as layers."""
        return self.model.layers + self.embedding_slot + self.loss_slot

    @property
    def layers_per_stage(self) -> int:
        """Number of layers of a stage, over all its chunks: the largest one, or of a stage between the first and the
        last one.
        """
        return max(self.stage_layers, default=self.slots // self.pp)

    @property
    def share_again(self) -> float:
        """Share of a stage's layers that full recomputation computes once more."""
        if self.recompute != "full" or not self.recompute_layers:
            return float(self.recompute == "full")
        return min(1.0, self.recompute_layers * self.vpp / self.layers_per_stage)

    def layers_on(self, stage: int) -> int:
        """Return the number of layers of a stage, over all its chunks."""
        if self.stage_layers:
            return self.stage_layers[stage]
        first, last = self.embedding_slot and stage == 0, self.loss_slot and stage == self.pp - 1
        return self.layers_per_stage - first - last

    @property
    def message_rows(self) -> int:
        """Number of rows of hidden values that one rank sends to the next stage."""
        return self.rows // (self.tp if self.scatter_gather or self.sequence_parallel else 1)

    @property
    def stage_parameters(self) -> int:
        """Number of parameters of the layers of a stage between the first and the last one on one rank, without routed
        experts; biases and norms are counted as if they were split.
        """
        return self.layers_per_stage * self.model.layer_parameters // self.tp

    def parameters_on(self, stage: int) -> int:
        """Return the number of parameters on one rank of a stage, without token embeddings and routed experts."""
        model, found = self.model, self.layers_on(stage) * self.model.layer_parameters // self.tp
        found += model.positions * model.hidden if stage == 0 else 0
        if stage == self.pp - 1:
            found += model.norm(model.hidden) + model.predictor_parameters // self.tp
        return found

    def routed_on(self, stage: int) -> int:
        """Return the number of parameters of routed experts on one rank of a stage."""
        model, ranks = self.model, self.ep * self.etp
        if (mixture := model.mixture) is None:
            return 0
        predictors = model.predictors if stage == self.pp - 1 else 0
        mixtures = self.layers_on(stage) * mixture.layers / model.layers + predictors
        return round(mixtures * model.routed_parameters / mixture.layers / ranks)

    def embeddings_on(self, stage: int) -> int:
        """Return the number of values on one rank of a stage of the token embedding, its copy and the output weight."""
        last = stage == self.pp - 1
        copies = (stage == 0 or (last and self.shares_embedding)) + (last and not self.model.tied)
        return copies * self.embedding_share

    @property
    def buckets(self) -> int:
        """Number of buckets of a stage's gradients. Megatron's buckets hold max(40 million, 1 million x replicas)
        parameters.
        """
        held = self.stage_parameters + self.routed_on(self.pp // 2)
        return self.vpp * max(1, round(held / self.vpp / max(40e6, 1e6 * self.replicas)))

    @property
    def embedding_share(self) -> int:
        """Number of values of the token embedding on one rank of the first or the last stage."""
        return self.model.embedding_parameters // self.tp

    @property
    def shares_embedding(self) -> bool:
        """True if the last stage holds a copy of the first stage's embedding: as output weight, or for MTP."""
        return self.model.tied or self.model.predictors > 0

    @property
    def unvalidated(self) -> tuple[str, ...]:
        """The options of this job that no public run has, so that no row tests their seconds."""
        model = self.model
        found = {
            "MLA": model.latent, "MTP": model.predictors, f"context parallelism over {self.cp} ranks": self.cp > 2,
            f"--cp-comm-type {self.cp_exchange}": self.cp > 1 and self.cp_exchange != "p2p",
            "--recompute-modules": set(self.recomputed) - {"core_attn", "layernorm", "moe_act"},
            "shared experts": model.mixture and model.mixture.shared,
            "the allgather dispatcher": self.ep > 1 and self.dispatcher == "allgather",
            f"{self.instances} instances of the distributed optimizer": self.instances > 1,
            "experts split over tensor-parallel ranks": model.mixture and self.etp > 1,
        }  # fmt: skip
        return tuple(name for name, used in found.items() if used)

    def replace(self, **changes: object) -> "Job":
        """Return a validated copy with some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]


def layout_of(job: Job) -> Layout:
    """Return a job's layout as training would know it."""
    mixture, overlaps = job.model.mixture, {"overlap_moe_expert_parallel_comm": job.expert_overlap}
    return Layout(
        stages=job.pp,
        data_parallel=job.replicas,
        tied_embeddings=job.shares_embedding,
        distributed_optimizer=job.distributed_optimizer,
        instances=job.instances,
        master_copies=job.value_bytes == 2,
        expert_parallel=job.ep if mixture else 0,
        row_width=row_width_of(Namespace(hidden_size=job.model.hidden)),
        routing=(mixture.experts, mixture.top_k, mixture.top_k) if mixture else (0, 0, 0),
        direct=direct_of(Namespace(expert_tensor_parallel_size=job.etp, **overlaps)),
    )
