//! Who answers the upload machines: local log, bucket, metadata store, with their faults.

use super::*;

impl World {
    /// A request reaches who answers it.
    pub fn apply(&mut self, uploader: usize, op: Op) {
        let Some(it) = self.uploaders.get(uploader) else {
            return;
        };
        if it.severed {
            return;
        }
        let dead = it.machine.is_none();
        if dead {
            if self.rng.chance(5_000) {
                return self.coverage.hit("crash without effect");
            }
            self.coverage.hit("crash with effect");
        }
        if self.fault(Trouble::LostBefore) {
            return self.coverage.hit("fault lost before");
        }
        match op {
            Op::ReadPointer(generation) => {
                let stream = self.uploaders.get(uploader).map_or(0, |it| it.stream);
                let outcome = match self.streams.get(stream) {
                    Some(state) if self.metadata_down_until_ms <= self.now_ms => {
                        state.metadata.read()
                    }
                    Some(_) | None => PointerRead::Unavailable,
                };
                if let Some(it) = self.uploaders.get_mut(uploader) {
                    it.read_none |= outcome == PointerRead::NotFound;
                }
                self.answer(
                    uploader,
                    MachineEvent::PointerRead {
                        generation,
                        outcome,
                    },
                );
            }
            Op::GetRoot(generation, pointer) => {
                let outcome = self.get_root(uploader, pointer);
                self.answer(
                    uploader,
                    MachineEvent::RootRead {
                        generation,
                        outcome,
                    },
                );
            }
            Op::Scan {
                generation,
                from_offset,
                seam,
                up_to_chunk_id,
                max_chunks,
                max_bytes,
            } => {
                if self.fault(Trouble::Scan) {
                    self.coverage.hit("fault scan");
                    // A log that is being recovered looks empty for a moment.
                    let end = match self.rng.chance(3_000) {
                        true => ScanEnd::Empty,
                        false => ScanEnd::Failed {
                            reason: "input/output error".to_owned(),
                        },
                    };
                    let batch = tiering_core::upload::ScanBatch {
                        chunks: Vec::new(),
                        end,
                    };
                    return self.answer(uploader, MachineEvent::Scanned { generation, batch });
                }
                let Some(it) = self.uploaders.get(uploader) else {
                    return;
                };
                let Some(state) = self.streams.get(it.stream) else {
                    return;
                };
                let Some(disk) = state.disks.get(it.node) else {
                    return;
                };
                let batch = disk.scan(
                    &state.log,
                    from_offset,
                    seam,
                    up_to_chunk_id,
                    max_chunks,
                    max_bytes,
                );
                self.answer(uploader, MachineEvent::Scanned { generation, batch });
            }
            Op::WriteAnchor(generation) => {
                let up = self.metadata_down_until_ms <= self.now_ms;
                let stream = self.uploaders.get(uploader).map_or(0, |it| it.stream);
                let ok = up
                    && self
                        .streams
                        .get_mut(stream)
                        .is_some_and(|state| state.metadata.write_anchor());
                self.answer(uploader, MachineEvent::AnchorWritten { generation, ok });
            }
            Op::Transfer(generation, transfer, plan) => {
                let cancelled = self
                    .uploaders
                    .get(uploader)
                    .is_some_and(|it| generation <= it.cancelled_generation);
                if cancelled && self.rng.chance(5_000) {
                    return;
                }
                let outcome = self.put_fragment(uploader, &plan);
                self.answer(
                    uploader,
                    MachineEvent::TransferDone {
                        generation,
                        transfer,
                        outcome,
                    },
                );
            }
            Op::PutRoot(generation, epoch, root) => {
                let outcome = self.put_root(uploader, epoch, &root);
                self.answer(
                    uploader,
                    MachineEvent::RootPut {
                        generation,
                        outcome,
                    },
                );
            }
            Op::Commit {
                generation,
                epoch,
                uid,
                expected_revision,
            } => {
                let outcome = self.commit(uploader, epoch, uid, expected_revision);
                if dead && matches!(outcome, CommitOutcome::Committed { .. }) {
                    self.coverage.hit("commit of a dead writer");
                }
                self.answer(
                    uploader,
                    MachineEvent::PointerCommitted {
                        generation,
                        outcome,
                    },
                );
            }
            Op::PutGroup(generation, group) => {
                let outcome = self.put_group(uploader, &group);
                self.answer(
                    uploader,
                    MachineEvent::GroupPut {
                        generation,
                        outcome,
                    },
                );
            }
            Op::GetGroup(generation, object) => {
                let outcome = self.get_group(uploader, object);
                self.answer(
                    uploader,
                    MachineEvent::GroupRead {
                        generation,
                        outcome,
                    },
                );
            }
            Op::Delete(objects) => self.delete(uploader, objects),
        }
    }

    pub(super) fn answer(&mut self, uploader: usize, event: MachineEvent) {
        if self
            .uploaders
            .get(uploader)
            .is_none_or(|it| it.machine.is_none())
        {
            return;
        }
        if self.fault(Trouble::LostAfter) {
            return self.coverage.hit("fault lost after");
        }
        if self.fault(Trouble::Duplicate) {
            self.coverage.hit("fault duplicate");
            let delay_ms = self.latency_ms();
            self.at(delay_ms, Event::Answer(uploader, event.clone()));
        }
        let delay_ms = self.latency_ms();
        self.at(delay_ms, Event::Answer(uploader, event));
    }

    /// Whether the store answers at all.
    pub fn store_failure(&mut self) -> Option<Failure> {
        if self.store_down_until_ms > self.now_ms {
            return Some(Failure::Transient("connection refused".to_owned()));
        }
        if self.store_denies_until_ms > self.now_ms {
            return Some(Failure::Stalled("403 AccessDenied".to_owned()));
        }
        // Not for all requests: a store that nobody reaches at all is another fault.
        if self.impostor_until_ms > self.now_ms && self.rng.chance(3_000) {
            self.coverage.hit("fault impostor");
            return Some(Failure::Transient(
                "bare_404: 404 without a code".to_owned(),
            ));
        }
        if self.fault(Trouble::Transient) {
            self.coverage.hit("fault transient");
            return Some(Failure::Transient("503 SlowDown".to_owned()));
        }
        if self.fault(Trouble::Stalled) {
            self.coverage.hit("fault stalled");
            return Some(Failure::Stalled("400 BadDigest".to_owned()));
        }
        None
    }

    fn read_failure(&mut self) -> Option<Failure> {
        if self.fault(Trouble::Corrupt) {
            return Some(Failure::Corrupt("checksum mismatch".to_owned()));
        }
        self.store_failure()
    }

    pub(super) fn get_root(&mut self, uploader: usize, pointer: Pointer) -> Result<Root, Failure> {
        if let Some(failure) = self.read_failure() {
            return Err(failure);
        }
        let stream = self.uploaders.get(uploader).map_or(0, |it| it.stream);
        let object = StoredObject::Root {
            epoch: pointer.epoch,
            uid: pointer.uid,
        };
        match self.bucket.get(stream, object) {
            Some(stored) => {
                Root::decode(&stored.bytes).map_err(|error| Failure::Corrupt(error.to_string()))
            }
            None => Err(Failure::NotFound("404 NoSuchKey".to_owned())),
        }
    }

    pub(super) fn put_fragment(
        &mut self,
        uploader: usize,
        plan: &FragmentPlan,
    ) -> Result<u32, Failure> {
        if let Some(failure) = self.store_failure() {
            return Err(failure);
        }
        let uid = self.rng.next() as u32;
        let Some(it) = self.uploaders.get(uploader) else {
            return Err(Failure::Transient(String::new()));
        };
        let (stream, node) = (it.stream, it.node);
        let Some(state) = self.streams.get(stream) else {
            return Err(Failure::Transient(String::new()));
        };
        let Some(disk) = state.disks.get(node) else {
            return Err(Failure::Transient(String::new()));
        };
        let mut bytes = fragment::HEADER.to_vec();
        for span in &plan.spans {
            match disk.segment_range(&state.log, span.segment_offset, span.start, span.end) {
                Some(part) => bytes.extend_from_slice(part),
                None => return Err(Failure::NotFound("enoent".to_owned())),
            }
        }
        bytes.extend_from_slice(&plan.index);
        if log_format::crc::crc32(&bytes) != plan.object_crc() {
            return Err(Failure::Stalled("400 BadDigest".to_owned()));
        }
        let stored = Stored {
            bytes: Bytes::from(bytes),
            next_offset: plan.next_offset,
            data_bytes: plan.size_bytes,
            timeline: state.log.timeline,
        };
        if state.metadata.deleted {
            self.coverage.hit("object after deletion");
        }
        self.check_fragment(stream, plan, &stored);
        let object = StoredObject::Fragment {
            first_offset: plan.first_offset,
            uid,
        };
        if !self.bucket.put(stream, object, stored) {
            self.violated(|| {
                format!("immutability: {object:?} was written twice with other bytes")
            });
        }
        Ok(uid)
    }

    pub(super) fn put_root(
        &mut self,
        uploader: usize,
        epoch: u64,
        root: &Root,
    ) -> Result<u32, Failure> {
        self.put_manifest(uploader, root.encode(), |uid| StoredObject::Root {
            epoch,
            uid,
        })
    }

    pub(super) fn put_group(&mut self, uploader: usize, group: &Group) -> Result<u32, Failure> {
        let (kind, first_offset) = (group.kind, group.first_offset);
        self.put_manifest(uploader, group.encode(), |uid| StoredObject::Group {
            kind,
            first_offset,
            uid,
        })
    }

    fn put_manifest(
        &mut self,
        uploader: usize,
        bytes: Vec<u8>,
        object_of: impl FnOnce(u32) -> StoredObject,
    ) -> Result<u32, Failure> {
        if let Some(failure) = self.store_failure() {
            return Err(failure);
        }
        let uid = self.rng.next() as u32;
        let stream = self.uploaders.get(uploader).map_or(0, |it| it.stream);
        let object = object_of(uid);
        if !self.bucket.put(stream, object, Stored::of_manifest(bytes)) {
            self.violated(|| {
                format!("immutability: {object:?} was written twice with other bytes")
            });
        }
        Ok(uid)
    }

    pub(super) fn get_group(
        &mut self,
        uploader: usize,
        object: StoredObject,
    ) -> Result<Group, Failure> {
        // As long as somebody else answers for them, no group comes; and now and then what comes looks like one.
        if self.impostor_until_ms > self.now_ms {
            self.coverage.hit("fault impostor");
            return Err(match self.rng.chance(1_200) {
                true => Failure::Corrupt("no group".to_owned()),
                false => Failure::Transient("bare_404: 404 without a code".to_owned()),
            });
        }
        if let Some(failure) = self.read_failure() {
            return Err(failure);
        }
        let stream = self.uploaders.get(uploader).map_or(0, |it| it.stream);
        match self.bucket.group(stream, object) {
            Some(group) => Ok((*group).clone()),
            None => Err(Failure::NotFound("404 NoSuchKey".to_owned())),
        }
    }

    pub(super) fn commit(
        &mut self,
        uploader: usize,
        epoch: u64,
        uid: u32,
        expected_revision: u64,
    ) -> CommitOutcome {
        if self.metadata_down_until_ms > self.now_ms {
            return CommitOutcome::Unknown;
        }
        let Some(it) = self.uploaders.get(uploader) else {
            return CommitOutcome::Unknown;
        };
        let stream = it.stream;
        let Some(state) = self.streams.get_mut(stream) else {
            return CommitOutcome::Unknown;
        };
        let before = state.metadata.pointer;
        let outcome = state.metadata.commit(epoch, uid, expected_revision);
        if state.metadata.pointer == before {
            if matches!(outcome, CommitOutcome::Committed { .. }) {
                self.coverage.hit("commit repeated");
            }
        } else {
            self.check_commit(uploader, before);
        }
        outcome
    }

    pub(super) fn delete(&mut self, uploader: usize, objects: Vec<StoredObject>) {
        if self.store_failure().is_some() {
            return;
        }
        let stream = self.uploaders.get(uploader).map_or(0, |it| it.stream);
        for object in objects {
            if self.fault(Trouble::PartialDelete) {
                self.coverage.hit("fault partial delete");
                continue;
            }
            self.check_delete(stream, object);
            if self.bucket.delete(stream, object) {
                self.coverage.hit(match object {
                    StoredObject::Group { .. } => "groups deleted",
                    StoredObject::Fragment { .. } | StoredObject::Root { .. } => "objects deleted",
                });
            }
        }
    }
}
