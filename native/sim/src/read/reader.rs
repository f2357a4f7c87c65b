//! Drives the read machine of a consumer, and answers it.

use super::*;

impl World {
    pub(super) fn reader_consumed(&mut self, consumer: usize) {
        let Some(Consumer {
            mode: Mode::Remote(remote),
            ..
        }) = self.consumers.get_mut(consumer)
        else {
            return;
        };
        let (chunks, bytes) = remote.queue.drain_taken();
        if chunks > 0 {
            remote.answered_ms = self.now_ms;
            remote
                .machine
                .handle(self.now_ms, ReaderEvent::Consumed { chunks, bytes });
            if self.rng.range(0, 15) == 0 {
                self.reader_taken_back(consumer);
            }
            self.reader_pump(consumer);
        }
    }

    /// Others need this reader's memory; its consumer asks again at once, or later.
    fn reader_taken_back(&mut self, consumer: usize) {
        let delay_ms = self.rng.range(0, 100);
        let Some(it) = self.consumers.get_mut(consumer) else {
            return;
        };
        let reader = it.reader;
        let Mode::Remote(remote) = &mut it.mode else {
            return;
        };
        if remote.machine.is_finished() {
            return;
        }
        self.coverage.hit("reader taken back");
        let chunks = remote.queue.take_all();
        let first = (chunks.front()).map(|chunk| (chunk.header.chunk_id, chunk.position));
        let wanted = delay_ms == 0;
        (remote.machine).handle(self.now_ms, ReaderEvent::TakenBack { first, wanted });
        if !wanted {
            let news = ReaderNews::Event(ReaderEvent::Wanted);
            self.at(delay_ms, Event::ReaderNews(consumer, reader, news));
        }
    }

    /// Something reaches a reader, if it still is the one.
    pub fn reader_news(&mut self, consumer: usize, reader: u64, news: ReaderNews) {
        let Some(it) = self.consumers.get_mut(consumer) else {
            return;
        };
        if it.reader != reader {
            return;
        }
        let Mode::Remote(remote) = &mut it.mode else {
            return;
        };
        let event = match news {
            ReaderNews::Event(event) => {
                remote.wakes_in_a_row = 0;
                if matches!(
                    event,
                    ReaderEvent::Fetched { .. } | ReaderEvent::Manifest { .. }
                ) {
                    remote.in_flight = remote.in_flight.saturating_sub(1);
                    remote.answered_ms = self.now_ms;
                }
                event
            }
            ReaderNews::Wake(at_ms) if remote.wake_ms == Some(at_ms) => {
                remote.wake_ms = None;
                remote.wakes_in_a_row += 1;
                ReaderEvent::Tick
            }
            ReaderNews::Wake(_) => return,
        };
        let stuck = remote.wakes_in_a_row > 2_000;
        remote.machine.handle(self.now_ms, event);
        self.reader_pump(consumer);
        if stuck {
            self.violated(|| {
                format!("liveness: the reader of consumer {consumer} is woken and never gets on")
            });
        }
    }

    /// Runs what the reader asks for. The place to add an effect.
    pub(super) fn reader_pump(&mut self, consumer: usize) {
        loop {
            let Some(it) = self.consumers.get_mut(consumer) else {
                return;
            };
            let reader = it.reader;
            let Mode::Remote(remote) = &mut it.mode else {
                return;
            };
            let Some(effect) = remote.machine.poll_effect() else {
                break;
            };
            match effect {
                Effect::RefreshManifest { id } => self.reader_ask(
                    consumer,
                    reader,
                    "reader RefreshManifest",
                    ReaderOp::Refresh(id),
                ),
                Effect::GetGroup { id, group, .. } => self.reader_ask(
                    consumer,
                    reader,
                    "reader GetGroup",
                    ReaderOp::GetGroup(id, group),
                ),
                Effect::GetIndex {
                    id,
                    fragment,
                    start,
                    end_max,
                    ..
                } => {
                    let op = ReaderOp::Get {
                        id,
                        fragment,
                        start,
                        end: end_max,
                        index: true,
                    };
                    self.reader_ask(consumer, reader, "reader GetIndex", op);
                }
                Effect::GetRange {
                    id,
                    fragment,
                    start,
                    end,
                    ..
                } => {
                    let op = ReaderOp::Get {
                        id,
                        fragment,
                        start,
                        end,
                        index: false,
                    };
                    self.reader_ask(consumer, reader, "reader GetRange", op);
                }
                Effect::Cancel { .. } => self.coverage.hit("reader Cancel"),
                Effect::Alarm { .. } => self.coverage.hit("reader Alarm"),
                Effect::Deliver(chunk) => {
                    remote.idle_ms = 0;
                    let _ = remote.queue.push(chunk);
                }
                Effect::Finish(finish) => {
                    remote.finished_ms = self.now_ms;
                    let _ = remote.queue.finish(finish);
                }
            }
        }
        let Some(it) = self.consumers.get_mut(consumer) else {
            return;
        };
        let reader = it.reader;
        let Mode::Remote(remote) = &mut it.mode else {
            return;
        };
        let broken = invariants::violated(&remote.machine);
        if !broken.is_empty() {
            let broken = broken.join(", ");
            return self.violated(|| format!("{broken}: the reader of consumer {consumer}"));
        }
        let counters = remote.machine.counters();
        if counters.chunk_crc_mismatches > remote.crc_seen {
            self.coverage.hit("reader crc mismatch");
        }
        remote.crc_seen = counters.chunk_crc_mismatches;
        let timeout_ms = remote.machine.poll_timeout();
        if timeout_ms != remote.wake_ms {
            remote.wake_ms = timeout_ms;
            if let Some(at_ms) = timeout_ms {
                self.at(
                    at_ms.saturating_sub(self.now_ms),
                    Event::ReaderNews(consumer, reader, ReaderNews::Wake(at_ms)),
                );
            }
        }
    }

    pub(super) fn reader_ask(
        &mut self,
        consumer: usize,
        reader: u64,
        name: &'static str,
        op: ReaderOp,
    ) {
        self.coverage.hit(name);
        if let Some(Consumer {
            mode: Mode::Remote(remote),
            ..
        }) = self.consumers.get_mut(consumer)
        {
            if remote.in_flight == 0 {
                remote.idle_ms = remote.idle_ms.max(self.now_ms - remote.answered_ms);
            }
            remote.in_flight += 1;
        }
        let delay_ms = self.latency_ms();
        self.at(delay_ms, Event::ReaderApply(consumer, reader, op));
    }

    /// A request of a reader is answered.
    pub fn reader_apply(&mut self, consumer: usize, reader: u64, op: ReaderOp) {
        if self
            .consumers
            .get(consumer)
            .is_none_or(|it| it.reader != reader)
        {
            return;
        }
        let is_range = matches!(op, ReaderOp::Get { index: false, .. });
        let event = match op {
            ReaderOp::Refresh(id) => {
                let known = self
                    .consumers
                    .get(consumer)
                    .and_then(|it| usable(self.streams.get(it.stream)?, it.node));
                let view = known.map_or(ManifestView::Unknown, ManifestView::Resolved);
                if view == ManifestView::Unknown {
                    self.coverage.hit("reader manifest unknown");
                }
                ReaderEvent::Manifest { id, view }
            }
            ReaderOp::GetGroup(id, group) => {
                let lost = self.fault(Trouble::LostAfter);
                let outcome = match (lost, self.store_failure()) {
                    (true, _) => Err(Failure::Transient("timeout".to_owned())),
                    (false, Some(failure)) => Err(failure),
                    (false, None) => self.read_group(consumer, group),
                };
                ReaderEvent::Fetched { id, outcome }
            }
            ReaderOp::Get {
                id,
                fragment,
                start,
                end,
                index,
            } => {
                // The runtime's requests have a deadline of their own: a lost answer is a passing failure.
                let lost = self.fault(Trouble::LostAfter);
                let outcome = match (lost, self.store_failure()) {
                    (true, _) => Err(Failure::Transient("timeout".to_owned())),
                    (false, Some(failure)) => Err(failure),
                    (false, None) => self.get_range(consumer, &fragment, start, end, index),
                };
                ReaderEvent::Fetched { id, outcome }
            }
        };
        let mut delay_ms = self.latency_ms();
        let event = match event {
            // A range comes in two parts, and the connection may break between them.
            ReaderEvent::Fetched {
                id,
                outcome: Ok(mut bytes),
            } if is_range && bytes.len() > 1 => {
                let length = self.rng.range(1, bytes.len() as u64 - 1);
                let part = bytes.split_to(usize::try_from(length).unwrap_or(1));
                self.coverage.hit("reader Part");
                let news = ReaderNews::Event(ReaderEvent::Part { id, bytes: part });
                self.at(delay_ms, Event::ReaderNews(consumer, reader, news));
                delay_ms += 1 + self.latency_ms();
                let outcome = if self.fault(Trouble::LostAfter) {
                    self.coverage.hit("reader range broken off");
                    Err(Failure::Transient("broken off".to_owned()))
                } else {
                    Ok(bytes)
                };
                ReaderEvent::Fetched { id, outcome }
            }
            event => event,
        };
        self.note(|| format!("consumer {consumer}: {}", shorten(&event)));
        self.at(
            delay_ms,
            Event::ReaderNews(consumer, reader, ReaderNews::Event(event)),
        );
    }

    /// A whole object: its checksum is the store's to keep, so damage is noticed by the client.
    fn read_group(&mut self, consumer: usize, group: GroupRef) -> Result<Bytes, Failure> {
        let stream = self.consumers.get(consumer).map_or(0, |it| it.stream);
        let object = StoredObject::Group {
            kind: group.kind,
            first_offset: group.first_offset,
            uid: group.uid,
        };
        if self.fault(Trouble::Corrupt) {
            self.coverage.hit("reader group corrupt");
            if let Some(it) = self.consumers.get_mut(consumer) {
                it.corrupted = true;
            }
            return Err(Failure::Corrupt("checksum mismatch".to_owned()));
        }
        match self.bucket.get(stream, object) {
            Some(stored) => Ok(stored.bytes.clone()),
            None => {
                self.coverage.hit("reader group gone");
                Err(Failure::NotFound("404 NoSuchKey".to_owned()))
            }
        }
    }

    pub(super) fn get_range(
        &mut self,
        consumer: usize,
        of: &FragmentRef,
        start: u64,
        end: u64,
        index: bool,
    ) -> Result<Bytes, Failure> {
        let stream = self.consumers.get(consumer).map_or(0, |it| it.stream);
        let object = StoredObject::Fragment {
            first_offset: of.first_offset,
            uid: of.uid,
        };
        let Some(stored) = self.bucket.get(stream, object) else {
            self.coverage.hit("reader object gone");
            return Err(Failure::NotFound("404 NoSuchKey".to_owned()));
        };
        let length = stored.bytes.len();
        let (from, to) = ((start as usize).min(length), (end as usize).min(length));
        let mut bytes = stored.bytes.slice(from..to);
        if self.fault(Trouble::Corrupt) {
            self.coverage.hit("fault corrupt");
            if let Some(it) = self.consumers.get_mut(consumer) {
                it.corrupted = true;
            }
            if index {
                return Err(Failure::Corrupt("checksum mismatch".to_owned()));
            }
            if let Some(spoilt) = self
                .streams
                .get(stream)
                .and_then(|state| spoil(&state.log, of, from, &bytes))
            {
                bytes = spoilt;
            }
        } else if bytes.len() > 1 && self.fault(Trouble::Short) {
            self.coverage.hit("fault short");
            let keep = 1 + self.rng.below(bytes.len() - 1);
            if !index {
                bytes.truncate(keep);
            }
        }
        Ok(bytes)
    }
}

/// Flips a bit of some chunk's data, which the chunk's CRC covers. (Nothing covers a chunk's header, filter and trailer.)
pub(super) fn spoil(log: &Log, of: &FragmentRef, from: usize, bytes: &Bytes) -> Option<Bytes> {
    let first = log.holding(of.first_offset);
    let base = log.start(first);
    let to = from + bytes.len();
    let at = (first..log.holding(of.next_offset)).find_map(|index| {
        let chunk = log.chunk(index)?;
        let start = fragment::HEADER_BYTES + chunk.start - base
            + HEADER_BYTES
            + usize::from(chunk.header.filter_bytes);
        let end = start + chunk.header.data_bytes as usize;
        let at = start.max(from);
        (at < end.min(to)).then_some(at)
    })?;
    let mut spoilt = bytes.to_vec();
    *spoilt.get_mut(at - from)? ^= 1;
    Some(Bytes::from(spoilt))
}
