//! What a machine says of itself, held against the reference: that it gave something up, that it is finished.

use super::*;

impl World {
    pub(super) fn recovered(
        &mut self,
        uploader: usize,
        kind: Recovery,
        from_offset: u64,
        to_offset: u64,
    ) {
        self.coverage.hit(match kind {
            Recovery::LocalLogAhead => "recovered LocalLogAhead",
            Recovery::RemoteTierAhead => "recovered RemoteTierAhead",
        });
        let Some(it) = self.uploaders.get_mut(uploader) else {
            return;
        };
        it.cut_to = match (kind, it.recovered) {
            (Recovery::RemoteTierAhead, None) => Some(to_offset),
            _ => None,
        };
        // Of two before a persist, the one that gives up more explains the result.
        if it.recovered != Some(Recovery::RemoteTierAhead) {
            it.recovered = Some(kind);
        }
        let (stream, node) = (it.stream, it.node);
        let Some(state) = self.streams.get_mut(stream) else {
            return;
        };
        if kind == Recovery::RemoteTierAhead {
            // A member that had trimmed by the lost manifest starts behind the place that this writer goes on at: until that is
            // uploaded again, its readers go from one to the other (docs/decisions/0008, limits).
            let floors = state.disks.iter().map(|disk| state.log.id(disk.first()));
            let floors: Vec<u64> = floors.filter(|floor| *floor > to_offset).collect();
            for floor in floors {
                self.coverage.hit("member trimmed past a cut");
                state.gaps.push((to_offset, floor));
            }
        }
        let justified = match kind {
            // What was to be uploaded next is not on the writer's disk any more, and what is given up is not more than that.
            Recovery::LocalLogAhead => state.disks.get(node).is_some_and(|disk| {
                let floor = state.log.id(disk.first());
                from_offset < floor && to_offset <= floor
            }),
            Recovery::RemoteTierAhead => !state.lost.is_empty(),
        };
        if !justified && !state.metadata.deleted {
            self.violated(|| {
                format!("reset safety: uploader {uploader} gave up without need ({kind:?})")
            });
        }
    }

    pub(super) fn machine_stopped(&mut self, uploader: usize, reason: StopReason) {
        self.coverage.hit(match reason {
            StopReason::Deleted => "stop Deleted",
            StopReason::Deposed => "stop Deposed",
        });
        let Some(it) = self.uploaders.get_mut(uploader) else {
            return;
        };
        it.stopped = Some(reason);
        let Some(state) = self.streams.get(it.stream) else {
            return;
        };
        let right = match reason {
            StopReason::Deleted => state.metadata.deleted,
            StopReason::Deposed => state.epoch > it.epoch || state.metadata.deleted,
        };
        if !right {
            self.violated(|| {
                format!("liveness: uploader {uploader} stopped without need ({reason:?})")
            });
        }
    }
}
