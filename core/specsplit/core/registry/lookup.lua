-- How many leading blocks of a prompt each replica holds.
-- KEYS: members    ARGV: prefix, hashes
-- Answers for each replica: name, incarnation, address, state, blocks in all, leading blocks.
-- Sets are closed under prefixes, so the length is found by doubling, then halving: O(log n) questions.
local num_hashes = #ARGV[2] / 16
local answer = {}
for _, member in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local held = redis.call('HMGET', ARGV[1] .. 'r:' .. member, 'incarnation', 'address', 'state', 'blocks')
  if held[1] then
    local key = ARGV[1] .. 'b:' .. member .. ':' .. held[1]
    local function has(index)
      return redis.call('SISMEMBER', key, string.sub(ARGV[2], index * 16 - 15, index * 16)) == 1
    end
    local present, absent = 0, 1
    while absent <= num_hashes and has(absent) do
      present, absent = absent, absent * 2
    end
    absent = math.min(absent, num_hashes + 1)
    while absent - present > 1 do
      local middle = math.floor((present + absent) / 2)
      if has(middle) then
        present = middle
      else
        absent = middle
      end
    end
    answer[#answer + 1] = {member, held[1], held[2], held[3], held[4], present}
  end
end
return answer
