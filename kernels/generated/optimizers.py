"""Steps of optimizers, over all parameters at once. Moments have the parameters' dtype or, beside 16-bit parameters,
fp32."""

from tk.generated import op
from tk.kernels.generated import FLOATS


def _adamw(params, grads, exp_avgs, exp_avg_sqs, steps, lr, beta1, beta2, eps, weight_decay, sign):
    """A step as torch.optim's fused one, in fp32 and rounded once; what follows from the step alone in fp64, since 1 -
    beta2 cancels in the first steps."""
    for param, grad, exp_avg, exp_avg_sq, step in zip(params, grads, exp_avgs, exp_avg_sqs, steps, strict=True):
        count = step + 1
        size = (lr / (1 - beta1 ** count.double())).float()
        spread = (1 - beta2 ** count.double()).sqrt().float()
        g, p, m, v = grad.float() * sign, param.float(), exp_avg.float(), exp_avg_sq.float()
        p = p - lr * weight_decay * p
        m = m + (1 - beta1) * (g - m)
        v = beta2 * v + (1 - beta2) * g * g
        param.copy_(p - size * m / (v.sqrt() / spread + eps))
        exp_avg.copy_(m)
        exp_avg_sq.copy_(v)
        step.copy_(count)


@op(
    params="T[...]*", grads="T[...]*", exp_avgs="T[...]*", exp_avg_sqs="T[...]*", steps="fp32[]*", lr="float",
    beta1="float", beta2="float", eps="float", weight_decay="float", sign="float", T=FLOATS,
)  # fmt: skip
def adamw(params, grads, exp_avgs, exp_avg_sqs, steps, lr, beta1, beta2, eps, weight_decay, sign):
    """A step in place. sign: -1 to maximize, else 1."""
    _adamw(params, grads, exp_avgs, exp_avg_sqs, steps, lr, beta1, beta2, eps, weight_decay, sign)


@op(
    params="T[...]*", grads="T[...]*", exp_avgs="fp32[...]*", exp_avg_sqs="fp32[...]*", steps="fp32[]*", lr="float",
    beta1="float", beta2="float", eps="float", weight_decay="float", sign="float", T=("bf16", "fp16"),
)  # fmt: skip
def adamw_mixed(params, grads, exp_avgs, exp_avg_sqs, steps, lr, beta1, beta2, eps, weight_decay, sign):
    """A step with moments in fp32."""
    _adamw(params, grads, exp_avgs, exp_avg_sqs, steps, lr, beta1, beta2, eps, weight_decay, sign)
