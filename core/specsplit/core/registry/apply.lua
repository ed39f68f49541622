-- Adds and removes blocks, all or none, so that the set stays closed under prefixes.
-- KEYS: replica, blocks    ARGV: incarnation, seq, added hashes, removed hashes
-- Answers OK, DUPLICATE, STALE, GAP, WRONG_INCARNATION or UNKNOWN; only OK changes anything.
local held = redis.call('HMGET', KEYS[1], 'incarnation', 'seq', 'blocks')
if not held[1] then
  return 'UNKNOWN'
end
if held[1] ~= ARGV[1] then
  return 'WRONG_INCARNATION'
end
local seq, next = tonumber(held[2]) or -1, tonumber(ARGV[2])
if next == seq then
  return 'DUPLICATE'
end
if next < seq then
  return 'STALE'
end
if next > seq + 1 or redis.call('SCARD', KEYS[2]) ~= tonumber(held[3]) then
  return 'GAP'
end
local function each(command, hashes)
  local members = {}
  for start = 1, #hashes, 16 do
    members[#members + 1] = string.sub(hashes, start, start + 15)
    if #members == 4000 or start + 16 > #hashes then -- unpack takes no more than 8,000
      redis.call(command, KEYS[2], unpack(members))
      members = {}
    end
  end
end
each('SREM', ARGV[4])
each('SADD', ARGV[3])
redis.call('HSET', KEYS[1], 'seq', next, 'blocks', redis.call('SCARD', KEYS[2]))
redis.call('PEXPIRE', KEYS[2], redis.call('PTTL', KEYS[1]))
return 'OK'
