"""A run continues with the chains that it had; what pools chains is refused."""

from pathlib import Path

import pytest
from torch import nn
from torch.multiprocessing import ProcessRaisedException

from tests.support import small_run
from tests.support.trainers import quiet_trainer


@pytest.mark.parametrize(("there", "here"), [(2, 1), (2, 3), (1, 2)])
def test_a_run_continues_with_as_many_chains(there: int, here: int, tmp_path: Path) -> None:
    trainer = quiet_trainer(max_epochs=2)
    trainer.fit(small_run.module(num_chains=there), small_run.loader())
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    with pytest.raises(ValueError, match=rf"num_chains={there} in each process, .* num_chains={here}: pass num_chains"):
        quiet_trainer(max_epochs=3).fit(
            small_run.module(num_chains=here), small_run.loader(), ckpt_path=tmp_path / "run.ckpt"
        )


def test_chains_of_one_process_do_not_pool_their_statistics() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    trainer = quiet_trainer(max_epochs=1, devices=2, strategy="ddp_fork", sync_batchnorm=True)
    with pytest.raises(ProcessRaisedException, match="sync_batchnorm=True pools the statistics of one network"):
        trainer.fit(small_run.module(net=net, num_chains=2), small_run.loader())
