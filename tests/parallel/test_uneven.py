"""What cannot be shared out is refused before training, in one sentence that says what to do."""

import pytest
from parallel import checks

from softmoe import parallel
from softmoe.models import model_config
from softmoe.parallel import Layout


def test_numbers_that_do_not_divide():
    """Experts and shards must divide the ranks, and one of them the other."""
    with pytest.raises(
        ValueError, match=r"parallel\.expert must divide the number of processes: got 3 for 4; possible are 1, 2, 4"
    ):
        Layout(4, 3, 1).check()
    with pytest.raises(ValueError, match=r"parallel\.shard must divide .* got 0 for 4"):
        Layout(4, 1, 0).check()
    with pytest.raises(
        ValueError, match=r"one of parallel.expert and parallel.shard must be a multiple of the other, got 2 and 3"
    ):
        Layout(6, 2, 3).check()


def test_experts_that_do_not_divide():
    """6 experts on 4 ranks, and more ranks than experts, name the numbers that would work."""
    model = checks.make_model("soft", num_experts=6)
    with pytest.raises(
        ValueError, match=r"6 experts cannot be shared evenly by 4 ranks: .* parallel.expert can be 1, 2; "
    ):
        parallel.check_model(model, Layout(4, 4))
    with pytest.raises(
        ValueError, match=r"4 experts cannot be shared evenly by 8 ranks: .* can be 1, 2, 4; parallel.shard"
    ):
        parallel.check_model(checks.make_model("soft"), Layout(8, 8))
    parallel.check_model(checks.make_model("soft"), Layout(8, 4, 8))  # more ranks than experts: cut them


def test_pieces_that_do_not_divide():
    """Experts are cut along their width; an odd width is refused."""
    with pytest.raises(ValueError, match="width 8 and hidden width 12 cannot be cut in 8 equal pieces"):
        parallel.check_model(checks.make_model("soft"), Layout(16, 2, 16))


def test_groups_stay_on_a_rank():
    """A routing group that would span ranks is refused; Soft has no groups."""
    config = model_config("tokens_choice_s16_32e", group_size=392)
    parallel.check_groups(config, 2)
    with pytest.raises(ValueError, match="groups of 392 tokens do not fit the 3 images x 196 tokens of a rank"):
        parallel.check_groups(config, 3)
    parallel.check_groups(model_config("soft_s16_32e"), 3)


def test_needs_a_process_group():
    """Without torchrun there is nothing to arrange."""
    with pytest.raises(ValueError, match="no process group: start with torchrun"):
        parallel.make_mesh()
