"""What ACP-SGD and Power-SGD share: gradients as matrices, factors, error feedback, fused sums."""
