-- Collects a part of a snapshot beside the set in use. With many parts and slow answers that takes longer than
-- the time between two heartbeats, so each part is one.
-- KEYS: replica, collected    ARGV: incarnation, hashes, ttl ms
-- Answers OK, WRONG_INCARNATION or UNKNOWN.
local held = redis.call('HGET', KEYS[1], 'incarnation')
if not held then
  return 'UNKNOWN'
end
if held ~= ARGV[1] then
  return 'WRONG_INCARNATION'
end
local members = {}
for start = 1, #ARGV[2], 16 do
  members[#members + 1] = string.sub(ARGV[2], start, start + 15)
end
redis.call('SADD', KEYS[2], unpack(members))
redis.call('PEXPIRE', KEYS[2], ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return 'OK'
