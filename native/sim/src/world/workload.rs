//! The workload: publishers, elections, crashes, deletions, retention, outages; what comes when is up to chance.

use super::*;

impl World {
    pub(super) fn workload(&mut self) {
        if self.quiet {
            return;
        }
        let pause_ms = self.rng.range(1, 15);
        self.at(pause_ms, Event::Workload);
        let stream = self.rng.below(self.streams.len());
        if self
            .streams
            .get(stream)
            .is_none_or(|stream| stream.metadata.deleted)
        {
            return;
        }
        let kind = self.rng.range(0, 999);
        let allowed = |trouble| self.plan.allows(trouble);
        match kind {
            0..=3 if allowed(Trouble::LeaderChange) => self.change_leader(stream),
            4..=9 if allowed(Trouble::Crash) => self.restart(stream),
            10 if allowed(Trouble::DataLoss) => self.lose_data(stream),
            11 if allowed(Trouble::Deletion) && self.rng.chance(4_000) => {
                self.delete_stream(stream)
            }
            12..=22 if allowed(Trouble::UserRetention) => self.user_retention(stream),
            23..=27 if allowed(Trouble::Bound) => self.change_bound(stream),
            28..=31 => self.outage(kind),
            32..=36 => self.request_cut(stream),
            37..=39 => self.new_replica(stream),
            40 if allowed(Trouble::DataLoss) => self.lose_disks(stream),
            41..=44 if allowed(Trouble::ClockStep) => self.step_clock(),
            _ => self.publish(stream),
        }
    }

    pub(super) fn publish(&mut self, stream: usize) {
        let mut count = self.rng.range(0, self.knobs.burst);
        let (timestamp_ms, written_ms) = (self.stamp_ms(), self.true_ms());
        let lag = self.rng.chance(3_000);
        let Some(state) = self.streams.get_mut(stream) else {
            return;
        };
        // What nobody bounds takes time to check and shows nothing new.
        let (backlog, entries) = state.current.as_ref().map_or((state.log.len(), 0), |root| {
            (
                state.log.len() - state.log.holding(root.next_offset),
                root.entries.len(),
            )
        });
        if backlog > MOST_BACKLOG || entries > MOST_ENTRIES {
            count = 0;
        }
        for _ in 0..count {
            state
                .log
                .append(&mut self.rng, state.epoch, timestamp_ms, written_ms);
        }
        for (node, disk) in state.disks.iter_mut().enumerate() {
            if node == state.writer || !lag {
                disk.replicate(&state.log, usize::MAX);
            }
        }
        if let Some(uploader) = state.uploader {
            self.tell_soon(uploader);
        }
    }

    pub(super) fn change_leader(&mut self, stream: usize) {
        let nodes = self.knobs.nodes;
        let (node, zombie) = (self.rng.below(nodes), self.rng.chance(7_000));
        let left_behind_ms = self.rng.range(10, 1_500);
        let start_ms = self.rng.range(1, 40);
        let Some(state) = self.streams.get_mut(stream) else {
            return;
        };
        if node == state.writer {
            return;
        }
        self.coverage.hit("leader change");
        state.writer = node;
        state.epoch += 1;
        let epoch = state.epoch;
        if let Some(disk) = state.disks.get_mut(node) {
            disk.replicate(&state.log, usize::MAX);
        }
        let old = state.uploader.take();
        self.note(|| {
            format!("stream {stream}: node {node} is the writer of epoch {epoch}, zombie: {zombie}")
        });
        if let Some(old) = old {
            if zombie {
                self.coverage.hit("zombie");
                self.at(left_behind_ms, Event::Drop(old));
            } else {
                self.crash(old);
            }
        }
        self.at(start_ms, Event::Start(stream));
    }

    pub(super) fn restart(&mut self, stream: usize) {
        let start_ms = self.rng.range(1, 60);
        let Some(uploader) = self
            .streams
            .get_mut(stream)
            .and_then(|state| state.uploader.take())
        else {
            return;
        };
        self.coverage.hit("crash");
        self.crash(uploader);
        self.at(start_ms, Event::Start(stream));
    }

    /// All nodes lose power before the end of the log was on any disk. What was on its way from them is lost, too.
    pub(super) fn lose_data(&mut self, stream: usize) {
        let depth = self.rng.range(1, 30) as usize;
        let start_ms = self.rng.range(1, 120);
        let Some(state) = self.streams.get_mut(stream) else {
            return;
        };
        let keep = state.log.len().saturating_sub(depth);
        // Never below what the writer's disk still has: that much a disk keeps.
        let keep = keep.max(state.disks.iter().map(NodeLog::first).max().unwrap_or(0) + 1);
        if keep >= state.log.len() {
            return;
        }
        self.coverage.hit("data loss");
        // A power cut takes more than one thing with it: the store comes back later, and somebody else answers for it.
        if self.plan.allows(Trouble::Impostor) && self.rng.chance(5_000) {
            self.impostor_until_ms = self.now_ms + self.rng.range(1_000, 12_000);
        }
        let Some(state) = self.streams.get_mut(stream) else {
            return;
        };
        state.log.lose_from(keep);
        for disk in &mut state.disks {
            disk.lose_from(keep);
        }
        let next_offset = state.log.next_offset();
        self.note(|| {
            format!("stream {stream}: all nodes lose everything from offset {next_offset} on")
        });
        self.lost_from(stream, next_offset, start_ms);
    }

    /// All nodes lose their disks. The log goes on where what is durable ends, with a chunk that says nothing.
    pub(super) fn lose_disks(&mut self, stream: usize) {
        let start_ms = self.rng.range(1, 120);
        let timestamp_ms = WALL_MS + self.now_ms as i64;
        let Some(state) = self.streams.get_mut(stream) else {
            return;
        };
        let Some(root) = state.current.as_ref() else {
            return;
        };
        let next_offset = root.next_offset;
        let keep = state.log.holding(next_offset);
        // A loss before this one that nobody has noticed yet: what is durable is of another timeline.
        let unnoticed = state.lost.iter().any(|(_, next)| next_offset > *next);
        if unnoticed || state.log.id(keep) != next_offset {
            return;
        }
        self.coverage.hit("disks lost");
        state.log.lose_from(keep);
        state.log.begin(state.epoch + 1, timestamp_ms);
        for disk in &mut state.disks {
            disk.start_over(keep);
            disk.replicate(&state.log, usize::MAX);
        }
        self.note(|| {
            format!("stream {stream}: all disks are lost, the log begins at {next_offset}")
        });
        self.lost_from(stream, next_offset, start_ms);
    }

    /// What was on its way from the nodes is lost with what was there, and all start over.
    fn lost_from(&mut self, stream: usize, next_offset: u64, start_ms: u64) {
        let Some(state) = self.streams.get_mut(stream) else {
            return;
        };
        let revision = state.metadata.pointer.map_or(0, |pointer| pointer.revision);
        state.lost.push((revision, next_offset));
        state.news_from.fill(revision);
        state.epoch += 1;
        state.uploader = None;
        state.known.fill(None);
        state.certain_gap_below.fill(None);
        for uploader in 0..self.uploaders.len() {
            if self
                .uploaders
                .get(uploader)
                .is_some_and(|it| it.stream == stream)
            {
                self.crash(uploader);
                if let Some(it) = self.uploaders.get_mut(uploader) {
                    it.severed = true;
                }
            }
        }
        self.reset_consumers(stream);
        self.at(start_ms, Event::Start(stream));
    }

    pub(super) fn delete_stream(&mut self, stream: usize) {
        let sweep_ms = self.rng.range(1, 100);
        let Some(state) = self.streams.get_mut(stream) else {
            return;
        };
        self.coverage.hit("stream deleted");
        state.metadata.delete();
        state.current = None;
        state.flat = None;
        state.known.fill(None);
        state.uploader = None;
        self.note(|| format!("stream {stream} is deleted"));
        for uploader in 0..self.uploaders.len() {
            if self
                .uploaders
                .get(uploader)
                .is_some_and(|it| it.stream == stream)
            {
                let left_behind_ms = self.rng.range(1, 2_000);
                self.at(left_behind_ms, Event::Drop(uploader));
            }
        }
        self.create_stream();
        self.reset_consumers(stream);
        self.at(sweep_ms, Event::Sweep(stream));
    }

    pub(super) fn sweep(&mut self, stream: usize) {
        self.coverage.hit("sweep");
        for object in self.bucket.list(stream) {
            self.bucket.delete(stream, object);
        }
    }

    pub(super) fn user_retention(&mut self, stream: usize) {
        let node = self.rng.below(self.knobs.nodes);
        let max_bytes = self.rng.range(300, 6_000);
        let by_age = self.rng.chance(3_000);
        let cutoff_ms = WALL_MS + self.now_ms as i64 - self.rng.range(100, 3_000) as i64;
        let Some(state) = self.streams.get_mut(stream) else {
            return;
        };
        let Some(disk) = state.disks.get_mut(node) else {
            return;
        };
        let bounds = if by_age {
            (None, Some(cutoff_ms))
        } else {
            (Some(max_bytes), None)
        };
        let mut trimmed = disk.clone();
        if !trimmed.trim_user(&state.log, bounds.0, bounds.1) {
            return;
        }
        // The one thing that nobody can tell afterwards: a log that lost its end, has grown past it, and was trimmed past it
        // by its user before anybody looked. Between the two ends the old records stay in the remote tier.
        let unnoticed = state.metadata.pointer.zip(state.current.as_ref());
        let unnoticed = unnoticed.is_some_and(|(pointer, root)| {
            state.lost.iter().any(|(revision, next)| {
                pointer.revision <= *revision
                    && root.next_offset > *next
                    && state.log.id(trimmed.first()) > *next
            })
        });
        if unnoticed {
            return;
        }
        *disk = trimmed;
        self.coverage.hit("local trim by the user");
        let floor = state.log.id(disk.first());
        // What this node knows of the manifest may be less: that is no reason to miss anything.
        let reach = state.current.as_ref().map_or(0, |root| root.next_offset);
        if floor > reach {
            self.coverage.hit("local trim made a gap");
            state.gaps.push((reach, floor));
        }
        self.note(|| {
            format!("stream {stream}: the user's retention moves node {node}'s floor to {floor}")
        });
        if let Some(uploader) = self.streams.get(stream).and_then(|state| state.uploader) {
            self.tell_soon(uploader);
        }
    }

    pub(super) fn new_replica(&mut self, stream: usize) {
        let node = self.rng.below(self.knobs.nodes);
        let Some(state) = self.streams.get_mut(stream) else {
            return;
        };
        if node == state.writer {
            return;
        }
        let from = state.disks.get(state.writer).map_or(0, NodeLog::first);
        if let Some(disk) = state.disks.get_mut(node) {
            disk.start_over(from);
            disk.replicate(&state.log, usize::MAX);
        }
        let revision = state.metadata.pointer.map_or(0, |pointer| pointer.revision);
        let floor = state.log.id(from);
        if let (Some(known), Some(news_from)) =
            (state.known.get_mut(node), state.news_from.get_mut(node))
        {
            (*known, *news_from) = (None, revision);
        }
        if let Some(certain) = state.certain_gap_below.get_mut(node) {
            *certain = None;
        }
        self.note(|| {
            format!("stream {stream}: node {node} starts over at {floor}, revision {revision}")
        });
        // Whatever ran there is gone, and its readers start over: their log was deleted under them.
        for uploader in 0..self.uploaders.len() {
            if self
                .uploaders
                .get(uploader)
                .is_some_and(|it| it.stream == stream && it.node == node)
            {
                self.crash(uploader);
            }
        }
        self.reset_consumers_of(stream, Some(node));
    }

    pub(super) fn change_bound(&mut self, stream: usize) {
        let bound = RetentionBound {
            max_bytes: self.rng.chance(6_000).then(|| self.rng.range(0, 8_000)),
            max_age_ms: self.rng.chance(4_000).then(|| self.rng.range(50, 4_000)),
        };
        let Some(state) = self.streams.get_mut(stream) else {
            return;
        };
        self.coverage.hit("bound changed");
        state.bound = bound;
        let least = |one: Option<u64>, other: Option<u64>| one.into_iter().chain(other).min();
        state.strictest.max_bytes = least(state.strictest.max_bytes, bound.max_bytes);
        state.strictest.max_age_ms = least(state.strictest.max_age_ms, bound.max_age_ms);
        if let Some(uploader) = state.uploader {
            self.tell_soon(uploader);
        }
    }

    pub(super) fn outage(&mut self, kind: u64) {
        let longest_ms = if kind == 31 { 8_000 } else { 1_500 };
        let until_ms = self.now_ms + self.rng.range(50, longest_ms);
        let (trouble, name) = match kind {
            28 => (Trouble::StoreOutage, "outage store"),
            29 => (Trouble::Denied, "outage denied"),
            31 => (Trouble::Impostor, "outage impostor"),
            _ => (Trouble::MetadataOutage, "outage metadata"),
        };
        if !self.plan.allows(trouble) {
            return;
        }
        self.coverage.hit(name);
        self.note(|| format!("{name} until {until_ms} ms"));
        match trouble {
            Trouble::StoreOutage => self.store_down_until_ms = until_ms,
            Trouble::Denied => self.store_denies_until_ms = until_ms,
            Trouble::Impostor => self.impostor_until_ms = until_ms,
            _ => self.metadata_down_until_ms = until_ms,
        }
    }

    pub(super) fn request_cut(&mut self, stream: usize) {
        if let Some(uploader) = self.streams.get(stream).and_then(|state| state.uploader) {
            self.coverage.hit("cut requested");
            self.at(1, Event::Answer(uploader, upload::Event::CutRequested));
        }
    }
}
